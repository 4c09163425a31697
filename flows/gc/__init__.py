"""Garbage collection of a yard, by policy: `python -m flows.gc`."""
