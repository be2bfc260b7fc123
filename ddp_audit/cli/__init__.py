"""The command line: one file per command; the only place that prints or picks an exit code."""
