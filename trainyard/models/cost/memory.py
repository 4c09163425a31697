"""Memory of training in theory, on the most loaded device, before anything is built.

The numbers are those of Megatron-LM's report: mixed precision (2 bytes a parameter, 4 its gradient,
12 master weight and Adam moments), biases and learned positions not counted, activations by
arXiv:2205.05198. Standard library only. s sequence, b micro-batch, h hidden, V padded
vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainyard.errors import ConfigError
from trainyard.models.config import GPTConfig
from trainyard.models.config_memory import RecomputeGranularity
from trainyard.models.moe_config import DENSE, MoEConfig

PARAMETER_BYTES = 2
GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a run is cut over devices and steps, as far as memory depends on it."""

    micro_batch_size: int = 1
    num_microbatches: int | None = None
    """Micro-batches of a step on each replica; unset: as many as the pipeline can hold."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    """Ranks that share each sequence; the report upstream does not know of them."""
    dp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    """Tensor-parallel size inside experts; unset: tp."""
    layers_per_virtual_stage: int | None = None
    """Layers of one chunk under the interleaved schedule; unset: the plain schedule."""
    virtual_stages: int | None = None
    """Chunks of a pipeline rank, where these are given in place of their layers."""
    first_rank_layers: int | None = None
    """Layers of the first pipeline rank, where not all ranks have as many."""
    sequence_parallel: bool = False
    recompute: RecomputeGranularity = "none"
    distributed_optimizer: bool = False
    fp32: bool = False
    """Weights and activations in fp32 and no master copy, in place of 16 bits; not in the
    report."""

    def check(self, config: GPTConfig, moe: MoEConfig = DENSE) -> None:
        """Refuse a layout that the model cannot be cut by."""
        if self.first_rank_layers is None:
            _divides("--num-layers", config.num_layers, "--pipeline-model-parallel-size", self.pp)
        heads, groups = config.num_attention_heads, config.query_groups
        _divides("--num-attention-heads", heads, "--tensor-model-parallel-size", self.tp)
        if config.group_query_attention:
            _divides("--num-query-groups", groups, "--tensor-model-parallel-size", self.tp)
        _divides("--ffn-hidden-size", config.ffn_size, "--tensor-model-parallel-size", self.tp)
        if self.layers_per_virtual_stage is not None:
            self._check_interleaving(config.num_layers // self.pp, self.layers_per_virtual_stage)
        if moe.num_experts is not None:
            _divides("--num-experts", moe.num_experts, "--expert-model-parallel-size", self.ep)

    @property
    def is_interleaved(self) -> bool:
        """Whether a pipeline rank holds several chunks."""
        return self.layers_per_virtual_stage is not None or (self.virtual_stages or 1) > 1

    def layers_as_on_first(self, config: GPTConfig) -> int:
        """Layers of the model, if all ranks had as many as the first one, which is looked at."""
        uneven = self.first_rank_layers
        return config.num_layers if uneven is None else uneven * self.pp

    def _check_interleaving(self, layers_per_stage: int, chunk: int) -> None:
        if self.pp == 1:
            raise ConfigError(
                "--num-layers-per-virtual-pipeline-stage needs "
                "--pipeline-model-parallel-size above 1"
            )
        _divides(
            "layers of a stage", layers_per_stage, "--num-layers-per-virtual-pipeline-stage", chunk
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Parameters of the whole model and of one device's share."""

    transformer_block: int
    active_transformer_block: int
    """Those that one token meets: fewer than all with experts."""
    embedding: int
    most_loaded_shard: float
    other_shards: float | None
    """A stage without embedding; None without pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """Bytes kept from forward to backward on the first stage."""

    per_layer: float
    total: float
    interleaved_penalty: float | None
    in_flight_microbatches: int | None
    with_sequence_parallel: bool


def count_parameters(
    config: GPTConfig, padded_vocab_size: int, layout: Layout, moe: MoEConfig = DENSE
) -> ParameterCount:
    """Parameters by Megatron-LM's report: weights and norms, no biases and no learned positions."""
    h, layers = config.hidden_size, config.num_layers
    norm = (2 if config.normalization == "LayerNorm" else 1) * h
    attention = h * (config.query_size + 2 * config.kv_size) + config.query_size * h
    mlp_width = config.ffn_size * (3 if config.gated else 2)
    dense, expert, experts, router = h * mlp_width, 0, 0, 0
    if moe.num_experts is not None:
        expert_ffn = moe.moe_ffn_hidden_size or config.ffn_size
        expert = h * expert_ffn * (3 if config.gated else 2)
        dense, experts, router = 0, moe.num_experts, moe.num_experts * h
    replicated = layers * (2 * norm + router) + norm
    split = layers * (attention + dense)
    embedding = padded_vocab_size * h
    expert_shards = layout.ep * (layout.expert_tp or layout.tp)
    block_shard = (
        split / layout.tp + layers * experts * expert / expert_shards + replicated
    ) / layout.pp
    other_shard = block_shard
    if layout.first_rank_layers is not None:
        first = layout.layers_as_on_first(config) / layers
        other_shard *= (layout.pp - first) / (layout.pp - 1)  # on average
        block_shard *= first
    tables = 2 if config.untie_embeddings_and_output_weights else 1
    tables_here = tables if layout.pp == 1 else 1
    visited = moe.moe_router_topk if experts else 0
    return ParameterCount(
        transformer_block=split + layers * experts * expert + replicated,
        active_transformer_block=split + layers * visited * expert + replicated,
        embedding=tables * embedding,
        most_loaded_shard=block_shard + tables_here * embedding / layout.tp,
        other_shards=other_shard if layout.pp > 1 else None,
    )


def optimizer_bytes_per_parameter(layout: Layout) -> float:
    """Master weight and moments, shared out over replicas by the distributed optimizer."""
    return OPTIMIZER_BYTES / (layout.dp if layout.distributed_optimizer else 1)


def weight_and_optimizer_bytes(
    config: GPTConfig, padded_vocab_size: int, layout: Layout, moe: MoEConfig = DENSE
) -> float:
    """Parameters, gradients and optimizer state on the most loaded device."""
    shard = count_parameters(config, padded_vocab_size, layout, moe).most_loaded_shard
    per_parameter = PARAMETER_BYTES + GRADIENT_BYTES + optimizer_bytes_per_parameter(layout)
    return shard * per_parameter


def activation_memory(
    config: GPTConfig, padded_vocab_size: int, layout: Layout
) -> ActivationMemory:
    """Activations on the first stage.

    Exact for sequence parallelism with selective recomputation; every other setting is estimated
    as attention that does not keep its s x s scores, plus 5 %."""
    precise = layout.sequence_parallel and layout.recompute == "selective"
    tokens = config.seq_length * layout.micro_batch_size
    h, tp = config.hidden_size, layout.tp
    if precise:
        per_layer = tokens * h * (18 + 4 * config.ffn_size / h) / tp
    else:
        per_layer = tokens * h * (10 + 24 / tp)
    share = 1 / tp if precise else 1.0
    embedding = (8 * tokens + tokens * h) * layout.pp * share  # ids as int64, dropout mask
    total = per_layer * layout.layers_as_on_first(config) + embedding
    penalty, in_flight = schedule_growth(config, layout)
    total *= penalty if layout.is_interleaved else in_flight / layout.pp
    if layout.pp == 1:
        total += _loss_bytes(tokens, h, padded_vocab_size, tp, precise)
    return ActivationMemory(
        per_layer=per_layer,
        total=total if precise else total * 1.05,
        interleaved_penalty=penalty if layout.is_interleaved else None,
        in_flight_microbatches=in_flight if layout.pp > 1 else None,
        with_sequence_parallel=precise,
    )


def full_recompute_bytes(config: GPTConfig, padded_vocab_size: int, layout: Layout) -> float:
    """Ours, which the report lacks: with full recomputation only the 16-bit input of each layer is
    kept, and one layer at a time is whole."""
    tokens = config.seq_length * layout.micro_batch_size
    inputs = 2.0 * tokens * config.hidden_size * layout.layers_as_on_first(config)
    if layout.sequence_parallel:
        inputs /= layout.tp
    penalty, in_flight = schedule_growth(config, layout)
    inputs *= penalty if layout.is_interleaved else in_flight / layout.pp
    one_layer = activation_memory(config, padded_vocab_size, layout).per_layer
    loss = _loss_bytes(tokens, config.hidden_size, padded_vocab_size, layout.tp, False)
    return inputs + one_layer + (loss if layout.pp == 1 else 0.0)


def schedule_growth(config: GPTConfig, layout: Layout) -> tuple[float, int]:
    """Growth under the interleaved schedule, and micro-batches held at once by the first stage."""
    if layout.is_interleaved:
        chunks = layout.virtual_stages
        if chunks is None:
            assert layout.layers_per_virtual_stage is not None
            chunks = config.num_layers // layout.pp // layout.layers_per_virtual_stage
        penalty = 1 + (layout.pp - 1) / (layout.pp * chunks)
        return penalty, math.ceil(penalty * layout.pp)
    return 1.0, min(layout.num_microbatches or layout.pp, layout.pp)


def _loss_bytes(tokens: int, h: int, vocab: int, tp: int, precise: bool) -> float:
    if precise:
        return 4 * tokens * h * (1 + vocab / h) / tp
    return 2 * (tokens * vocab / tp + tokens * h)


def _divides(what: str, value: int, by: str, divisor: int) -> None:
    if divisor < 1:
        raise ConfigError(f"{by} must be above 0, got {divisor}")
    if value % divisor:
        raise ConfigError(f"{what} ({value}) must be divisible by {by} ({divisor})")
