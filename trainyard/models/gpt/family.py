"""GPT's row in the table of model families. Standard library only."""

from trainyard.models.costs.flops import MODEL_FLOPS, flops_per_iteration
from trainyard.models.costs.memory import activation_bytes, shard_params
from trainyard.models.family import ModelFamily
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.moe.report import layer_sums

GPT = ModelFamily(
    config=GPTConfig,
    module="trainyard.models.gpt.model:GPTModel",
    sample_format="trainyard.models.gpt.samples:sample_format",
    more_losses=lambda config: config.mtp.loss_names,
    predicts_next=True,
    generates=True,
    layer_sums=layer_sums,
    flops_per_iteration=flops_per_iteration,
    flop_convention=MODEL_FLOPS,
    shard_params=shard_params,
    activation_bytes=activation_bytes,
)
