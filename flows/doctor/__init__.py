"""What a yard needs, looked at before anything is run in it: `python -m flows.doctor`."""
