"""Checkpoints of Megatron core in its `torch_dist` format."""
