"""Inside a rank: one file per kind of hook; they watch the job and write its journal."""
