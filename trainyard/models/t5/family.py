"""T5's row in the table of model families. Standard library only."""

from trainyard.models.costs.memory import activation_bytes, shard_params
from trainyard.models.family import ModelFamily
from trainyard.models.t5.config import T5Config
from trainyard.models.t5.flops import MODEL_FLOPS, flops_per_iteration

T5 = ModelFamily(
    config=T5Config,
    module="trainyard.models.t5.model:T5Model",
    sample_format="trainyard.models.t5.samples:sample_format",
    of_sentences=True,
    generates=True,
    flops_per_iteration=flops_per_iteration,
    flop_convention=MODEL_FLOPS,
    shard_params=shard_params,
    activation_bytes=activation_bytes,
)
