"""Memory of generation: weights, and of each request keys and values of its tokens, and states.

Of a device of each pipeline stage, as the engines of `trainyard.inference` allocate it: grouped
queries keep the heads of their groups alone, and latents stand for keys and values; tensor
parallelism cuts heads and matrices, experts among them; each pipeline stage keeps its own layers. A
layer without attention has no keys and values; that of Mamba-2 has a state, however long the
request, and a stage of MLPs alone has neither.
Recomputation, context and expert parallelism are of trainings and change nothing here. A pass over
prompts takes the most in an MLP; steps of a token are not counted, nor logits and workspaces of
kernels. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trainyard.models.config import TransformerConfig
from trainyard.models.costs.memory_detail import expert_parameters_here, parameters_here
from trainyard.models.parallel_layout import ParallelLayout

PROMPT_TOKENS = 8192
"""Of prompts that pass a model together, unless a single one is longer: enough to keep a large GPU
busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceMemory:
    """Bytes of one device."""

    weights: float
    kv_per_token: float
    """Keys and values of one token of a request; of a T5, of the decoder."""
    kv_per_source_token: float
    """Of one token that the decoder of a T5 looks at in its encoder; 0 for other families."""
    state: float
    """States of a request; 0 for a family without."""
    per_prompt_token: float
    """Beside these, of each token of the prompts that are computed at once. Experts, and layers
    without an MLP, are not counted."""
    tokens: int
    """Of a request with its output."""
    source_tokens: int

    @property
    def kv_per_request(self) -> float:
        """Keys and values of one request."""
        source = self.source_tokens * self.kv_per_source_token
        return self.tokens * self.kv_per_token + source

    @property
    def per_request(self) -> float:
        """What is kept of one request."""
        return self.kv_per_request + self.state

    def requests_in(self, memory: float) -> float:
        """How many requests fit into so many bytes beside the weights: a whole number, or inf where
        nothing of a request is kept."""
        if memory < self.weights:
            return 0
        return (memory - self.weights) // self.per_request if self.per_request else math.inf


def kv_numbers(config: TransformerConfig, layers: range, tp: int = 1) -> int:
    """Keys and values of one token in these layers, as numbers of the type of the weights."""
    of_layer = sum(heads * channels for heads, channels in config.cached_heads(tp))
    return of_layer * sum(map(config.has_attention, layers))


def state_bytes(config: TransformerConfig, layers: range, tp: int, bytes_each: int) -> int:
    """The states of one request in these layers. bytes_each: of a weight."""
    return sum(
        math.prod(one.shape) * (4 if one.is_fp32 else bytes_each)
        for layer in layers
        for one in config.state_shapes(layer, tp)
    )


def prompt_numbers(config: TransformerConfig, tp: int) -> int:
    """Of a token in a dense MLP, where a layer is at its widest: the residual stream as it entered
    the first layer, this one and the MLP, its norm, what the first matrix gives, and the activation
    of that."""
    parts = 3 if config.gated else 2
    return 4 * config.hidden_size + parts * config.ffn_size // tp


def rows_at_once(batch_size: int, longest: int) -> int:
    """Prompts of a fixed batch that pass the model together. longest: tokens of the longest."""
    return min(batch_size, max(1, PROMPT_TOKENS // longest))


def inference_memory(
    config: TransformerConfig,
    padded_vocab_size: int,
    layout: ParallelLayout,
    *,
    bytes_each: int,
    tokens: int,
) -> list[InferenceMemory]:
    """Of a device of each pipeline stage.

    layout: tensor and pipeline parallelism decide. bytes_each: of a weight, a key or a value.
    tokens: of a request with its output; of a T5, of its decoder, and its text is --seq-length."""
    layout = replace(layout, ep=1, expert_tp=layout.tp)
    count = -(-config.all_layers // layout.pp)
    stages = []
    for number in range(layout.pp):
        layers = range(config.all_layers)[number * count :][:count]
        weights = parameters_here(
            config,
            padded_vocab_size,
            layout,
            layers,
            has_embedding=number == 0,
            has_output=number == layout.pp - 1,
        ) + expert_parameters_here(config, layout, layers)
        is_t5 = config.model_type == "t5"
        decoding = range(max(layers.start, config.num_layers), layers.stop) if is_t5 else layers
        of_token = kv_numbers(config, decoding, layout.tp) * bytes_each
        stages.append(
            InferenceMemory(
                weights=weights * bytes_each,
                kv_per_token=of_token,
                kv_per_source_token=of_token if is_t5 else 0.0,
                state=state_bytes(config, layers, layout.tp, bytes_each),
                per_prompt_token=prompt_numbers(config, layout.tp) * bytes_each,
                tokens=tokens,
                source_tokens=config.seq_length if is_t5 else 0,
            )
        )
    return stages
