"""`python -m flows.register --profile NAME`: write all that a yard needs to a Prefect server."""
