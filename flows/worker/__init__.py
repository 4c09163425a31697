"""A Prefect worker that stops its flow runs before it ends: `python -m flows.worker`."""
