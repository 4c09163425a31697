"""Checkpoints: what a step looks like at rest, saving it, loading it, and the formats of others."""
