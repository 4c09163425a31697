"""Floating-point operations of training a BERT: as `costs.flops`, with attention in both directions
whole and the heads counted. Standard library only."""

from __future__ import annotations

from trainyard.models.bert.config import BertConfig
from trainyard.models.costs.flops import matmul_weights_per_token
from trainyard.models.family import FlopConvention

MODEL_FLOPS = FlopConvention(
    "6N+full",
    "6 for each matrix weight and token, heads in, attention in both directions, no recompute",
)
"""What this module counts."""


def flops_per_iteration(
    config: BertConfig, padded_vocab_size: int, global_batch_size: int
) -> float:
    """Operations of one optimizer step over `global_batch_size` samples of seq_length tokens."""
    s, h = config.seq_length, config.hidden_size
    weights = matmul_weights_per_token(config, padded_vocab_size) + h * h
    attention = 2 * s * config.query_size * config.num_layers  # scores and values
    pooled = h * h + 2 * h if config.bert_binary_head else 0
    return 6.0 * global_batch_size * (s * (weights + attention) + pooled)
