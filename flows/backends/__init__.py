"""Backends of stages: what to start, the block that starts it, and what its end means."""
