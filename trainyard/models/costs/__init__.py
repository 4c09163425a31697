"""Costs of a transformer by its options: FLOPs, memory."""
