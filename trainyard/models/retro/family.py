"""Retro's row in the table of model families. Standard library only."""

from trainyard.models.costs.memory import activation_bytes, shard_params
from trainyard.models.family import ModelFamily
from trainyard.models.retro.config import RetroConfig
from trainyard.models.retro.flops import MODEL_FLOPS, flops_per_iteration

RETRO = ModelFamily(
    config=RetroConfig,
    module="trainyard.models.retro.model:RetroModel",
    sample_format="trainyard.models.retro.samples:sample_format",
    predicts_next=True,
    generates=True,
    neighbor_shape=RetroConfig.neighbor_shape,
    fitted_from={"gpt": ("decoder.layers.*.pre_cross_attn_layernorm.*", "*.cross_attention.*")},
    flops_per_iteration=flops_per_iteration,
    flop_convention=MODEL_FLOPS,
    shard_params=shard_params,
    activation_bytes=activation_bytes,
)
