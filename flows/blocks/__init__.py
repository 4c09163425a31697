"""Where a stage runs: each place is a Prefect JobBlock and its JobRun."""
