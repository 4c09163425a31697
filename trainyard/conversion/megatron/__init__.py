"""Checkpoints of Megatron-LM in its `torch` format."""
