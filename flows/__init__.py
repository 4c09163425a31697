"""When: Prefect flows, retries, job blocks. The only place that imports prefect."""
