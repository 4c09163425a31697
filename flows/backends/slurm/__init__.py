"""A stage as a job of Slurm."""
