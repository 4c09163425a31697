"""Floating-point operations of training a T5: as `costs.flops`, with the tokens of encoder and
decoder each in their layers. Standard library only."""

from __future__ import annotations

from trainyard.models.family import FlopConvention
from trainyard.models.t5.config import T5Config

MODEL_FLOPS = FlopConvention(
    "6N+full+cross",
    "6 for each matrix weight and token, output layer in, the decoder's own attention at half, no "
    "recompute",
)
"""What this module counts."""


def flops_per_iteration(config: T5Config, padded_vocab_size: int, global_batch_size: int) -> float:
    """Operations of one optimizer step over `global_batch_size` samples."""
    s_e, s_d, h = config.seq_length, config.decoder_length, config.hidden_size
    q, kv = config.query_size, config.kv_size
    layer = h * (2 * q + 2 * kv) + h * config.ffn_size * (3 if config.gated else 2)
    encoder = config.num_layers * s_e * (layer + 2 * s_e * q)
    # A query looks at half of the decoder's tokens and at all of the encoder's, each for its score
    # and its value; keys and values of cross-attention are made once for each token of the encoder.
    of_decoder = s_d * (layer + 2 * h * q + s_d * q + 2 * s_e * q) + s_e * 2 * h * kv
    decoder = config.decoder_layers * of_decoder
    return 6.0 * global_batch_size * (encoder + decoder + s_d * h * padded_vocab_size)
