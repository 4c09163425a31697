"""Pure: what is to be started, and what its end means; no cluster and no Prefect."""
