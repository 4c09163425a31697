"""`python -m flows.register --yard NAME`: write all that a yard needs to a Prefect server."""
