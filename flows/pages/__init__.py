"""What Prefect's pages show of a flow run."""
