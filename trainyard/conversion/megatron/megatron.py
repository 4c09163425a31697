"""Checkpoints of Megatron-LM in its `torch` format: what reads and what writes them."""

from trainyard.conversion.megatron.read import MegatronSource, open_megatron
from trainyard.conversion.megatron.write import write_megatron

__all__ = ["MegatronSource", "open_megatron", "write_megatron"]
