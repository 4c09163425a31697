"""Theoretical memory of training a Retro: as `costs.memory`, with cross attention and the encoder
of neighbours. Standard library only."""

from __future__ import annotations

from trainyard.models.costs import memory
from trainyard.models.parallel_layout import ParallelLayout
from trainyard.models.retro.config import RetroConfig


def shard_params(config: RetroConfig, padded_vocab_size: int, layout: ParallelLayout) -> float:
    """Parameters of the most loaded rank: the encoder is on the stage of the first layer with cross
    attention, which may be that of the embedding."""
    decoder = memory.shard_params(config, padded_vocab_size, layout)
    h, q, kv = config.hidden_size, config.query_size, 2 * config.kv_size
    cross = h * (q + kv) + q * h
    mlp = h * config.ffn_size * (3 if config.gated else 2)
    encoder = config.retro_encoder_layers * (cross + mlp) + cross
    return decoder + (encoder + len(config.cross_layers) * cross / layout.pp) / layout.tp


def activation_bytes(config: RetroConfig, padded_vocab_size: int, layout: ParallelLayout) -> float:
    """Activations of the most loaded rank in 16 bits. A token of a neighbour costs in a layer of
    the encoder what a token of the sample costs in the decoder; a layer with cross attention keeps
    about half as much again, and the keys and values of its neighbours."""
    decoder = memory.activation_bytes(config, padded_vocab_size, layout)
    one_layer = memory.activation_memory(config, padded_vocab_size, layout).per_layer
    of_neighbors = one_layer * config.neighbor_tokens / config.seq_length
    keys = 4.0 * config.kv_size * config.neighbor_tokens * layout.micro_batch_size / layout.tp
    cross = len(config.cross_layers) * (one_layer / 2 + keys)
    encoder = config.retro_encoder_layers * of_neighbors
    if layout.recompute == "full":  # one layer at a time, the one with the encoder if it is here
        return decoder + encoder + one_layer / 2 + keys
    _, in_flight = layout.activation_growth(config)
    return decoder + (encoder + cross) * in_flight / layout.pp
