"""Floating-point operations of training a Mamba-2 or a hybrid: as `costs.flops`, with the scan of
Mamba-2 as Megatron-LM counts it. Standard library only."""

from __future__ import annotations

from trainyard.models.family import FlopConvention
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.pattern import ATTENTION, EXPERTS, MAMBA, MLP

MODEL_FLOPS = FlopConvention(
    "6N+causal+scan",
    "6 for each matrix weight and token, output layer in, causal attention at half, the scan at "
    "21 for each number of its state and token, no recompute",
)
"""What this module counts."""

SCAN = 3.5
"""Multiply-adds of the scan for each number of the state and token: decay, write, read and sums, 7
operations in the recurrence. In chunks there are more, which do not count."""


def flops_per_iteration(
    config: MambaConfig, padded_vocab_size: int, global_batch_size: int
) -> float:
    """Operations of one optimizer step over `global_batch_size` samples of seq_length tokens."""
    s = config.seq_length
    of_token = sum(
        config.count(letter) * _multiply_adds(config, letter)
        for letter in (MAMBA, ATTENTION, MLP, EXPERTS)
        if config.count(letter)
    )
    return 6.0 * global_batch_size * s * (of_token + config.hidden_size * padded_vocab_size)


def _multiply_adds(config: MambaConfig, letter: str) -> float:
    """Of one token in a layer of a kind, forward."""
    h, moe = config.hidden_size, config.experts
    if letter == MAMBA:
        matrices = h * (sum(config.projected_sizes) + config.inner_size)
        return matrices + SCAN * config.inner_size * config.mamba_state_dim
    if letter == ATTENTION:
        weights = h * (config.query_size + 2 * config.kv_size) + config.query_size * h
        return float(weights + config.seq_length * config.query_size)
    width = config.ffn_size
    if letter == EXPERTS:
        width = config.expert_ffn_size * moe.moe_router_topk
        width += moe.moe_shared_expert_intermediate_size or 0
    return float(h * width * (3 if config.gated else 2))
