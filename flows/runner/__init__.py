"""A flow run: stages are submitted, followed, retried and cancelled."""
