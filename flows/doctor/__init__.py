"""Checks of a yard before anything runs in it: `python -m flows.doctor`."""
