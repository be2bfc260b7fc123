"""How a process becomes a probed one. Standard library only; loaded into every process of the job."""
