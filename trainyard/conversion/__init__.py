"""Checkpoint formats of others, a folder each, and what they share."""
