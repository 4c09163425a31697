"""A flow run at work: each stage is submitted, followed, retried and cancelled."""
