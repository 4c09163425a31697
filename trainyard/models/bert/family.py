"""BERT's row in the table of model families. Standard library only."""

from trainyard.models.bert.config import SOP_LOSS, BertConfig
from trainyard.models.bert.flops import MODEL_FLOPS, flops_per_iteration
from trainyard.models.costs.memory import activation_bytes, shard_params
from trainyard.models.family import ModelFamily


def _more_losses(config: BertConfig) -> tuple[str, ...]:
    return (SOP_LOSS,) if config.bert_binary_head else ()


BERT = ModelFamily(
    config=BertConfig,
    module="trainyard.models.bert.model:BertModel",
    sample_format="trainyard.models.bert.samples:sample_format",
    of_sentences=True,
    more_losses=_more_losses,
    flops_per_iteration=flops_per_iteration,
    flop_convention=MODEL_FLOPS,
    shard_params=shard_params,
    activation_bytes=activation_bytes,
)
