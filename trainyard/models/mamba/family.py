"""Mamba's row in the table of model families. Standard library only."""

from trainyard.models.costs.memory import activation_bytes, shard_params
from trainyard.models.family import ModelFamily
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.flops import MODEL_FLOPS, flops_per_iteration
from trainyard.models.moe.report import layer_sums

MAMBA = ModelFamily(
    config=MambaConfig,
    module="trainyard.models.mamba.model:MambaModel",
    sample_format="trainyard.models.gpt.samples:sample_format",
    predicts_next=True,
    generates=True,
    layer_sums=layer_sums,
    kernels="trainyard.models.mamba.kernels:report_mamba",
    flops_per_iteration=flops_per_iteration,
    flop_convention=MODEL_FLOPS,
    shard_params=shard_params,
    activation_bytes=activation_bytes,
)
