"""Theoretical memory of training on the most loaded device.

The numbers are those of Megatron-LM's report: mixed precision (2 bytes a parameter, 4 its gradient,
12 master weight and Adam moments), biases and learned positions not counted, activations by
arXiv:2205.05198. Standard library only. s sequence, b micro-batch, h hidden, V padded
vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.parallel_layout import ParallelLayout, busiest_layers
from trainyard.models.param_counts import attention_matrices


def check_layout(layout: ParallelLayout, config: TransformerConfig) -> None:
    """Raise ConfigError for a layout that does not divide the model."""
    pp, tp, chunk = layout.pp, layout.tp, layout.layers_per_virtual_stage
    if layout.first_rank_layers is None:
        _divides("--num-layers", config.all_layers, "--pipeline-model-parallel-size", pp)
    by = "--tensor-model-parallel-size"
    _divides("--num-attention-heads", config.num_attention_heads, by, tp)
    if config.group_query_attention:
        _divides("--num-query-groups", config.query_groups, by, tp)
    _divides("--ffn-hidden-size", config.ffn_size, by, tp)
    if chunk is not None:
        by = "--num-layers-per-virtual-pipeline-stage"
        if pp == 1:
            raise ConfigError(f"{by} needs --pipeline-model-parallel-size above 1")
        _divides("layers of a stage", config.all_layers // pp, by, chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Parameters of the whole model and of one device's share."""

    transformer_block: int
    active_transformer_block: int
    """Parameters that one token uses: fewer than all with experts."""
    embedding: int
    most_loaded_shard: float
    other_shards: float | None
    """A stage without embedding; None without pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """Bytes kept from forward to backward pass on the first stage."""

    per_layer: float
    total: float
    interleaved_penalty: float | None
    in_flight_microbatches: int | None
    with_sequence_parallel: bool


def count_parameters(
    config: TransformerConfig,
    padded_vocab_size: int,
    layout: ParallelLayout,
) -> ParameterCount:
    """Parameters by Megatron-LM's report: weights and norms, no biases and no learned positions."""
    h, depths = config.hidden_size, config.mtp.mtp_num_layers or 0
    layers = config.all_layers + depths
    across = config.num_cross_layers(range(config.all_layers))
    norm = (2 if config.normalization == "LayerNorm" else 1) * h
    attention, whole_attention = attention_matrices(config)
    moe, matrices = config.experts, 3 if config.gated else 2
    mixtures = sum(map(config.has_experts, config.trained_layers))
    expert, experts = h * config.expert_ffn_size * matrices, mixtures * (moe.num_experts or 0)
    shared = h * (moe.moe_shared_expert_intermediate_size or 0) * matrices
    final = 1 + (config.all_layers > config.num_layers)  # a second stack has one too
    replicated = layers * (2 * norm + whole_attention) + experts * h + (final + across) * norm
    replicated += depths * (2 * h * h + 3 * norm)
    dense = (layers - mixtures) * h * config.ffn_size * matrices + mixtures * shared
    split = layers * attention + dense + across * attention
    inner = config.num_inner_layers(
        range(config.all_layers)
    )  # on one stage, the first of them with cross
    inner_replicated = inner * 2 * norm + bool(inner) * norm
    inner_split = inner * (attention + h * config.ffn_size * matrices) + bool(inner) * attention
    embedding = padded_vocab_size * h
    expert_shards = layout.ep * (layout.expert_tp or layout.tp)
    routed, visited = experts * expert, mixtures * moe.moe_router_topk * expert
    if own := config.layer_costs(range(layers)):
        split = sum(layer.split for layer in own)
        replicated = sum(layer.whole for layer in own) + norm
        routed = sum(layer.routed for layer in own)
        visited = sum(layer.visited for layer in own)
    block_shard = (split / layout.tp + routed / expert_shards + replicated) / layout.pp
    other_shard = block_shard
    if layout.first_rank_layers is not None:
        first = layout.layers_as_on_first(config) / config.all_layers
        other_shard *= (layout.pp - first) / (layout.pp - 1)  # on average
        block_shard *= first
    block_shard += inner_split / layout.tp + inner_replicated
    block = split + inner_split + replicated + inner_replicated
    tables = 2 if config.untie_embeddings_and_output_weights else 1
    tables_here = tables if layout.pp == 1 else 1
    return ParameterCount(
        transformer_block=block + routed,
        active_transformer_block=block + visited,
        embedding=tables * embedding,
        most_loaded_shard=block_shard + tables_here * embedding / layout.tp,
        other_shards=other_shard if layout.pp > 1 else None,
    )


def shard_params(
    config: TransformerConfig, padded_vocab_size: int, layout: ParallelLayout
) -> float:
    """Parameters of the most loaded rank."""
    return count_parameters(config, padded_vocab_size, layout).most_loaded_shard


def activation_bytes(
    config: TransformerConfig, padded_vocab_size: int, layout: ParallelLayout
) -> float:
    """Activations of the most loaded rank in 16 bits, of whole sequences."""
    if layout.recompute == "full":
        return full_recompute_bytes(config, padded_vocab_size, layout)
    return activation_memory(config, padded_vocab_size, layout).total


def activation_memory(
    config: TransformerConfig, padded_vocab_size: int, layout: ParallelLayout
) -> ActivationMemory:
    """Activations on the first stage, or on the one that keeps more for a sample.

    Exact for sequence parallelism with selective recomputation; every other setting is estimated
    as attention that does not keep its s x s scores, plus 5 %."""
    precise = layout.sequence_parallel and layout.recompute == "selective"
    tokens = config.seq_length * layout.micro_batch_size
    h, tp = config.hidden_size, layout.tp
    if precise:
        per_layer = tokens * h * (18 + 4 * config.ffn_size / h) / tp
    else:
        per_layer = tokens * h * (10 + 24 / tp)
    if own := config.layer_costs(range(config.all_layers)):
        between = tp if layout.sequence_parallel else 1
        mean = sum(layer.kept_bytes(h, tp, between, 2, 2) for layer in own) / len(own)
        per_layer = tokens * mean
    share = 1 / tp if precise else 1.0
    embedding = (8 * tokens + tokens * h) * layout.pp * share  # ids as int64, dropout mask
    total = per_layer * layout.equal_layers(config) + embedding
    penalty, in_flight = layout.activation_growth(config)
    total *= penalty if layout.is_interleaved else in_flight / layout.pp
    if layout.pp == 1:
        of_output = config.output_length * layout.micro_batch_size
        total += _loss_bytes(of_output, h, padded_vocab_size, tp, precise)
    return ActivationMemory(
        per_layer=per_layer,
        total=total if precise else total * 1.05,
        interleaved_penalty=penalty if layout.is_interleaved else None,
        in_flight_microbatches=in_flight if layout.pp > 1 else None,
        with_sequence_parallel=precise,
    )


def full_recompute_bytes(
    config: TransformerConfig, padded_vocab_size: int, layout: ParallelLayout
) -> float:
    """Activations under full recomputation, which Megatron-LM's report lacks: the 16-bit input of
    each layer, and all of one layer at a time."""
    tokens = config.seq_length * layout.micro_batch_size
    inputs = 2.0 * tokens * config.hidden_size * layout.equal_layers(config)
    if layout.sequence_parallel:
        inputs /= layout.tp
    penalty, in_flight = layout.activation_growth(config)
    inputs *= penalty if layout.is_interleaved else in_flight / layout.pp
    one_layer = activation_memory(config, padded_vocab_size, layout).per_layer
    one_layer *= config.equal_layers(busiest_layers(config, 1))
    of_output = config.output_length * layout.micro_batch_size
    loss = _loss_bytes(of_output, config.hidden_size, padded_vocab_size, layout.tp, False)
    return inputs + one_layer + (loss if layout.pp == 1 else 0.0)


def _loss_bytes(tokens: int, h: int, vocab: int, tp: int, precise: bool) -> float:
    if precise:
        return 4 * tokens * h * (1 + vocab / h) / tp
    return 2 * (tokens * vocab / tp + tokens * h)


def _divides(what: str, value: int, by: str, divisor: int) -> None:
    if divisor < 1:
        raise ConfigError(f"{by} must be above 0, got {divisor}")
    if value % divisor:
        raise ConfigError(f"{what} ({value}) must be divisible by {by} ({divisor})")
