"""How sentences become the samples of a BERT."""

from __future__ import annotations

from trainyard.datasets.masked.bert import BertFormat
from trainyard.models.bert.config import BertConfig
from trainyard.models.family import SampleOptions


def sample_format(config: BertConfig, options: SampleOptions) -> BertFormat:
    """The format that the options describe."""
    return BertFormat.of(
        options.tokenizer,
        options.masked,
        config.seq_length,
        options.seed,
        config.bert_binary_head,
    )
