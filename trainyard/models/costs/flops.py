"""Floating-point operations of training, by the convention behind Megatron-LM's TFLOP/s/GPU.

Matrix products of the model, the output layer included, at 2 a multiply-add, times 3 for forward
and backward; causal attention at half of s x s, a window not taken off. Embedding lookup, norms,
optimizer and recomputation do not count. Standard library only."""

from __future__ import annotations

from trainyard.models.config import TransformerConfig
from trainyard.models.family import FlopConvention
from trainyard.models.param_counts import attention_matrices

MODEL_FLOPS = FlopConvention(
    "6N+causal",
    "6 for each matrix weight and token, output layer in, causal attention at half, no recompute",
)
"""What this module counts."""


def flops_per_iteration(
    config: TransformerConfig, padded_vocab_size: int, global_batch_size: int
) -> float:
    """Operations of one optimizer step over `global_batch_size` samples of seq_length tokens."""
    s = config.seq_length
    weights = matmul_weights_per_token(config, padded_vocab_size)
    # Scores and values, causal half.
    of_layer = s * (config.query_size + config.context_size) / 2
    attention = of_layer * len(config.trained_layers)
    return 6.0 * global_batch_size * s * (weights + attention)


def flops_per_token(config: TransformerConfig, padded_vocab_size: int) -> float:
    """Operations of one token of a full-length sample, forward and backward."""
    return flops_per_iteration(config, padded_vocab_size, 1) / config.seq_length


def matmul_weights_per_token(config: TransformerConfig, padded_vocab_size: int) -> int:
    """Weights that one token is multiplied with; of routed experts, only those that it visits, and
    as in Megatron-LM not the router's."""
    h, moe = config.hidden_size, config.experts
    attention = sum(attention_matrices(config))
    layers = len(config.trained_layers)
    mixtures = sum(map(config.has_experts, config.trained_layers))
    visited = config.expert_ffn_size * moe.moe_router_topk
    visited += moe.moe_shared_expert_intermediate_size or 0
    width = (layers - mixtures) * config.ffn_size + mixtures * visited
    mlps = h * width * (3 if config.gated else 2)
    return layers * attention + mlps + output_weights_per_token(config, padded_vocab_size)


def output_weights_per_token(config: TransformerConfig, padded_vocab_size: int) -> int:
    """Those of the output layer and, for every depth of multi-token prediction, of the output layer
    again and of the matrix that joins tokens to hidden states."""
    h, depths = config.hidden_size, config.mtp.mtp_num_layers or 0
    return h * padded_vocab_size * (1 + depths) + depths * 2 * h * h
