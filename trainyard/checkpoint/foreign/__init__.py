"""Checkpoint formats of others, one module each."""
