"""Memory of training as this project uses it, kind by kind, on the most loaded device.

`memory.py` repeats Megatron-LM's formulas. This counts every parameter, biases and learned
positions included, and the tensors that autograd keeps of each operation with fused attention. It
considers grouped queries, gated MLPs, context parallelism, recomputation, offloading, and what
replicas shard. torch.compile keeps less. Not counted: workspaces of kernels, communication buffers,
fragmentation. Standard library only.

Bytes for one token of one micro-batch unless noted. h hidden, q and kv widths of all query and key
heads, f MLP, V padded vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from trainyard.models.config import TransformerConfig
from trainyard.models.layer_costs import LayerCosts
from trainyard.models.parallel_layout import (
    GRADIENT_BYTES,
    MAIN_BYTES,
    ParallelLayout,
    busiest_layers,
)
from trainyard.models.param_counts import (
    mlp_params,
    router_params,
    shared_expert_params,
    whole_attention_params,
)
from trainyard.parallel.data_config import FULLY_SHARDED

MLP_TENSORS = {
    **{"gelu": 2, "gelu_tanh": 2, "quick_gelu": 3, "squared_relu": 2},
    **{"relu": 1, "swiglu": 4, "quick_geglu": 5, "geglu_tanh": 4},
}
"""Tensors of the MLP's width that are kept: the first matrix's output (gate and up), what the
activation makes of it on the way, and the second matrix's input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetailedMemory:
    """Bytes of one device."""

    stage: str
    """Which pipeline stage it is: only, first, last, or its number and how many there are."""
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Kept by the layers for the micro-batches in flight."""
    logits: float
    """Final norm, logits and loss of one micro-batch."""

    @property
    def total(self) -> float:
        """All of it."""
        model = self.parameters + self.gradients + self.optimizer
        return model + self.activations + self.logits


def detailed_memory(
    config: TransformerConfig, padded_vocab_size: int, layout: ParallelLayout
) -> DetailedMemory:
    """Memory of the stage that needs most."""
    count = -(-config.all_layers // layout.pp)
    busiest = busiest_layers(config, count).start // count
    numbers = dict.fromkeys((0, layout.pp - 1, busiest))
    stages = [_stage(config, padded_vocab_size, layout, number) for number in numbers]
    return max(stages, key=lambda stage: stage.total)


def _stage(
    config: TransformerConfig, vocab: int, layout: ParallelLayout, number: int
) -> DetailedMemory:
    everything = range(config.all_layers)
    count = -(-len(everything) // layout.pp)
    is_first, is_last = number == 0, number == layout.pp - 1
    layers = everything[-count:] if is_last else everything[number * count :][:count]
    depths = config.mtp.mtp_num_layers or 0
    if is_last and depths:
        layers = range(layers.start, layers.stop + depths)
    weights = parameters_here(
        config, vocab, layout, layers, has_embedding=is_first, has_output=is_last
    )
    experts = expert_parameters_here(config, layout, layers)
    replicas = layout.dp * layout.cp
    spread = layout.ep * (layout.expert_tp or layout.tp)
    gathered = weights - _layers_here(config, vocab, layout, layers)
    gathered += max((_layers_here(config, vocab, layout, one) for one in _each(layers)), default=0)
    mixtures = max(_mixtures(config, layers), 1)
    kept = [
        _kept_of_model(weights, gathered, replicas, layout),
        _kept_of_model(experts, experts / mixtures, replicas * layout.tp / spread, layout),
    ]
    samples = layout.micro_batch_size / layout.cp
    return DetailedMemory(
        stage=_name(number, layout.pp),
        parameters=sum(kind.parameters for kind in kept),
        gradients=sum(kind.gradients for kind in kept),
        optimizer=sum(kind.optimizer for kind in kept),
        activations=config.seq_length
        * samples
        * _stage_activations(config, layout, layers, number),
        logits=(
            config.output_length * samples * (1 + depths) * _logits(config, vocab, layout)
            if is_last
            else 0.0
        ),
    )


class ModelBytes(NamedTuple):
    """Bytes of a rank for parameters."""

    parameters: float
    gradients: float
    optimizer: float


def _kept_of_model(
    count: float, gathered: float, replicas: float, layout: ParallelLayout
) -> ModelBytes:
    """Bytes of this many parameters, which `replicas` ranks hold alike. gathered: those of them
    that a rank has whole at one time where weights are sharded: all outside of layers, and a
    layer's."""
    width, main = (4, 0) if layout.fp32 else (2, MAIN_BYTES)
    state = (main + layout.moment_bytes) * (1 - layout.offloaded)
    if replicas == layout.instances:  # nobody to share with
        return ModelBytes(count * width, count * layout.gradient_bytes, count * state)
    shards = layout.shards(replicas)
    if layout.sharding in FULLY_SHARDED:
        state = MAIN_BYTES + layout.moment_bytes  # fp32 rows beside whole weights, in fp32 too
    grads = layout.gradient_bytes if layout.sharding not in FULLY_SHARDED else GRADIENT_BYTES
    whole = gathered if layout.sharding == "optim_grads_params" else count
    return ModelBytes(
        whole * width, count * grads / shards.gradients, count * state / shards.optimizer
    )


def _layers_here(
    config: TransformerConfig, vocab: int, layout: ParallelLayout, layers: range
) -> float:
    """Parameters of these layers alone."""
    return parameters_here(config, vocab, layout, layers, has_embedding=False, has_output=False)


def _each(layers: range) -> list[range]:
    return [range(layer, layer + 1) for layer in layers]


def _name(number: int, pp: int) -> str:
    if pp == 1:
        return "only"
    return {0: "first", pp - 1: "last"}.get(number, f"{number + 1} of {pp}")


def parameters_here(
    config: TransformerConfig,
    padded_vocab_size: int,
    layout: ParallelLayout,
    layers: range,
    *,
    has_embedding: bool,
    has_output: bool,
) -> float:
    """Parameters of one tensor-parallel rank of a stage with these layers, every one counted except
    those of routed experts."""
    h, tp = config.hidden_size, layout.tp
    table = padded_vocab_size * h / tp
    if own := config.layer_costs(layers):
        count = sum(layer.whole + layer.split / tp for layer in own)
    else:
        count = _transformer_parameters(config, layers, tp)
    if has_embedding:
        count += table + config.embedding_params()
    if has_output:
        tied = not config.untie_embeddings_and_output_weights
        rows = padded_vocab_size // tp
        has_both = has_embedding and config.mtp.mtp_num_layers is not None
        tables = 1 + (config.mtp.mtp_num_layers is not None and not tied and not has_both)
        count += config.output_params(rows) + (0 if tied and has_embedding else tables * table)
    return count


def _transformer_parameters(config: TransformerConfig, layers: range, tp: int) -> float:
    """Of these layers, with the modules inside of them."""
    inner = config.num_inner_layers(layers)
    count = (len(layers) + inner) * _layer_parameters(config, tp)
    if mixtures := _mixtures(config, layers):
        dense, shared = mlp_params(config, config.ffn_size), shared_expert_params(config)
        count += mixtures * (router_params(config) + (shared - dense) / tp)
    if across := config.num_cross_layers(layers) + bool(inner):
        whole = config.norm_params() + (config.hidden_size if config.linear_bias else 0)
        count += across * (whole + (config.cross_params() - whole) / tp)
    return count


def expert_parameters_here(
    config: TransformerConfig, layout: ParallelLayout, layers: range
) -> float:
    """Parameters of the routed experts of these layers on one rank."""
    if not (mixtures := _mixtures(config, layers)):
        return 0.0
    routed = (config.experts.num_experts or 0) * mlp_params(config, config.expert_ffn_size)
    return mixtures * routed / (layout.ep * (layout.expert_tp or layout.tp))


def _mixtures(config: TransformerConfig, layers: range) -> int:
    """How many of these layers have experts."""
    return sum(config.has_experts(layer) for layer in layers) if config.experts.enabled else 0


def _layer_parameters(config: TransformerConfig, tp: int) -> float:
    """Norms, and biases of the matrices that are cut by columns, are whole on every rank."""
    whole: float = 2 * config.norm_params()
    if config.linear_bias:
        whole += 2 * config.hidden_size
    whole += whole_attention_params(config)
    return whole + (config.layer_params() - whole) / tp


# --- activations ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LayerBytes:
    """Bytes that a layer keeps for one token, by module."""

    residual: float
    """One of the two inputs of norms."""
    normalised: float
    """One of the two outputs of norms."""
    attention: float
    """q, k, v and the context, which the output projection keeps alike."""
    softmax: float
    """Log-sum-exp of each head."""
    mlp: float
    """Of a dense MLP, or of the experts that the token visits."""

    @property
    def all(self) -> float:
        return 2 * (self.residual + self.normalised) + self.attention + self.softmax + self.mlp


def _mlp_tensors(config: TransformerConfig) -> int:
    """`MLP_TENSORS`, and the gate within its bound and the up that was moved."""
    bounded, moved = config.activation_func_clamp_value is not None, config.glu_linear_offset != 0.0
    return MLP_TENSORS[config.activation] + bounded + (bounded or moved)


def _mixture_bytes(config: TransformerConfig, layout: ParallelLayout) -> float:
    """Kept by a mixture of experts for one token of a balanced load: its rows on the way to the
    experts, inside and on the way back, logits and scores in fp32, and the shared expert."""
    moe, width = config.experts, 4 if layout.fp32 else 2
    tensors = _mlp_tensors(config)
    inside = 2 * config.hidden_size * (layout.expert_tp or layout.tp)
    rows = moe.moe_router_topk * (inside + tensors * config.expert_ffn_size + config.hidden_size)
    shared = tensors * (moe.moe_shared_expert_intermediate_size or 0)
    return (width * (rows + shared) + 2 * 4 * (moe.num_experts or 0)) / layout.tp


def _layer_bytes(
    config: TransformerConfig, layout: ParallelLayout, *, mixture: bool = False
) -> _LayerBytes:
    h, tp, width = config.hidden_size, layout.tp, 4 if layout.fp32 else 2
    between = tp if layout.sequence_parallel else 1
    heads = config.query_size + config.kv_size
    attention: float = width * (heads + config.value_size + config.context_size)
    latent = config.latent
    if latent.enabled:
        latents = (latent.q_lora_rank or 0) + latent.kv_lora_rank
        copies = 2 if config.qk_layernorm else 1  # before and after their norms
        attention += width * tp / between * copies * latents
    elif config.qk_layernorm or config.qk_l2_norm:
        attention += width * heads  # before their norms
    mlp = width * config.ffn_size * _mlp_tensors(config)
    residual = 4 if config.fp32_residual_connection else width
    return _LayerBytes(
        residual=residual * h / between,
        normalised=width * h / between,
        attention=attention / tp,
        softmax=4 * config.num_attention_heads / tp,
        mlp=_mixture_bytes(config, layout) if mixture else mlp / tp,
    )


def layer_activation_bytes(
    config: TransformerConfig, layout: ParallelLayout, *, mixture: bool = False
) -> float:
    """Kept by one layer for one token, after selective recomputation. mixture: one with experts."""
    kept = _layer_bytes(config, layout, mixture=mixture)
    total = kept.all
    if config.recomputes("core_attn"):
        total -= kept.softmax
    if config.recomputes("mlp"):
        total -= kept.mlp + kept.normalised
    if config.recomputes("layernorm"):
        total -= kept.normalised * (1 if config.recomputes("mlp") else 2)
    return total


def _stage_activations(
    config: TransformerConfig, layout: ParallelLayout, layers: range, number: int
) -> float:
    """Of all layers of a stage and all micro-batches in flight, for one token of each."""
    kept, transient = _kept_by_layers(config, layout, layers)
    growth, in_flight = layout.activation_growth(config)
    if number == layout.pp - 1:
        return kept + transient
    if layout.is_interleaved:
        return kept * layout.pp * growth + transient
    return kept * max(min(in_flight, layout.pp - number), 1) + transient


def _kept_by_layers(
    config: TransformerConfig, layout: ParallelLayout, layers: range
) -> tuple[float, float]:
    """(kept by the layers of a stage, needed transiently in the backward pass). Layers count as
    equal: where some are of another kind, each has the mean of all."""
    mixtures, count = _mixtures(config, layers), len(layers)
    dense = layer_activation_bytes(config, layout)
    whole, largest = dense, dense
    if own := config.layer_costs(layers):
        each = [_own_bytes(config, layout, costs) for costs in own]
        whole, largest = sum(each) / count, max(each)
    elif mixtures:
        mixture = layer_activation_bytes(config, layout, mixture=True)
        whole = (mixtures * mixture + (count - mixtures) * dense) / count
        largest = max(mixture, dense)
    entry = _layer_bytes(config, layout).residual
    equal = config.equal_layers(layers)
    size = config.recompute_num_layers or 1
    if config.recompute == "full" and config.recompute_method == "block":
        again = min(size, count)
        kept_whole = config.equal_layers(layers[again:])
        return (equal - kept_whole) * entry + kept_whole * whole, _most(config, layers, 1) * largest
    if config.recompute == "full":
        units = -(-count // size)
        return units * entry * equal / count, _most(config, layers, size) * largest
    offloaded = min(config.cpu_offloading_num_layers, count)
    kept = (count - offloaded) * equal / count
    return kept * whole, 2 * largest * equal / count if offloaded else 0.0


def _own_bytes(config: TransformerConfig, layout: ParallelLayout, costs: LayerCosts) -> float:
    """Kept for one token by a layer that is not attention followed by an MLP."""
    between, width = layout.tp if layout.sequence_parallel else 1, 4 if layout.fp32 else 2
    residual = 4 if config.fp32_residual_connection else width
    return costs.kept_bytes(config.hidden_size, layout.tp, between, width, residual)


def _most(config: TransformerConfig, layers: range, size: int) -> float:
    """Of this many consecutive layers, those that cost most, as `equal_layers`."""
    starts = range(0, len(layers), size)
    return max(config.equal_layers(layers[start : start + size]) for start in starts)


def _logits(config: TransformerConfig, vocab: int, layout: ParallelLayout) -> float:
    """Final norm's input and output, and logits, which their gradient overwrites."""
    kept, width = _layer_bytes(config, layout), 4 if layout.fp32 else 2
    copies = 3 if layout.fp32 else 1  # torch's own cross entropy in fp32
    return kept.residual + kept.normalised + copies * width * vocab / layout.tp
