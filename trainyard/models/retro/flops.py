"""Floating-point operations of training a Retro: as `costs.flops`, with cross attention and the
encoder of neighbours. Standard library only.

s sequence, m tokens of a chunk, k neighbours of a chunk, r tokens of a neighbour, h hidden."""

from __future__ import annotations

from trainyard.models.costs import flops
from trainyard.models.family import FlopConvention
from trainyard.models.retro.config import RetroConfig

MODEL_FLOPS = FlopConvention(
    "6N+retro",
    "6 for each matrix weight and token of sample and neighbours, attention of the decoder at half "
    "and to and in neighbours whole, padding in, no recompute",
)
"""What this module counts."""


def flops_per_iteration(
    config: RetroConfig, padded_vocab_size: int, global_batch_size: int
) -> float:
    """Operations of one optimizer step over `global_batch_size` samples with their neighbours."""
    decoder = flops.flops_per_iteration(config, padded_vocab_size, global_batch_size)
    return decoder + 6.0 * global_batch_size * (_of_cross_attention(config) + _of_encoder(config))


def _of_cross_attention(config: RetroConfig) -> int:
    """Multiply-adds of a sample, in all layers of the decoder that attend to neighbours."""
    s, h, retrieved = config.seq_length, config.hidden_size, config.neighbor_tokens
    queries = 2 * s * h * config.query_size  # linear_q and linear_proj
    keys = retrieved * h * 2 * config.kv_size
    keys_of_query = config.retro_num_neighbors * config.retrieved_length
    scores = 2 * s * keys_of_query * config.query_size
    return len(config.cross_layers) * (queries + keys + scores)


def _of_encoder(config: RetroConfig) -> int:
    """Multiply-adds of the neighbours of a sample."""
    h, retrieved, layers = config.hidden_size, config.neighbor_tokens, config.retro_encoder_layers
    weights = flops.matmul_weights_per_token(config, 0) // config.num_layers
    attention = 2 * config.retrieved_length * config.query_size
    queries = 2 * retrieved * h * config.query_size
    keys = config.seq_length * h * 2 * config.kv_size
    scores = 2 * retrieved * config.retro_chunk_length * config.query_size
    return layers * retrieved * (weights + attention) + queries + keys + scores
