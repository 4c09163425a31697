"""Memory of generation: weights, and keys and values of the tokens of each request.

Of the device that holds most, as the engines of `trainyard.inference` allocate it: grouped queries
keep the heads of their groups alone, and latents stand for keys and values; tensor parallelism cuts
heads and matrices, experts among them; each pipeline stage keeps its own layers. Recomputation,
context and expert parallelism are of trainings and change nothing here. Not counted: workspaces of
kernels, logits, hidden states. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainyard.models.config import TransformerConfig
from trainyard.models.costs.memory_detail import expert_parameters_here, parameters_here
from trainyard.models.parallel_layout import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceMemory:
    """Bytes of one device."""

    weights: float
    kv_per_token: float
    """Keys and values of one token of a request; of a T5, of the decoder."""
    kv_per_source_token: float
    """Of one token that the decoder of a T5 looks at in its encoder; 0 for other families."""
    tokens: int
    """Of a request with its output."""
    source_tokens: int

    @property
    def per_request(self) -> float:
        """Keys and values of one request."""
        source = self.source_tokens * self.kv_per_source_token
        return self.tokens * self.kv_per_token + source

    def requests_in(self, memory: float) -> int:
        """How many requests fit into so many bytes beside the weights."""
        return max(int((memory - self.weights) // self.per_request), 0)


def inference_memory(
    config: TransformerConfig,
    padded_vocab_size: int,
    layout: ParallelLayout,
    *,
    bytes_each: int,
    tokens: int,
) -> InferenceMemory:
    """layout: tensor and pipeline parallelism decide. bytes_each: of a weight, a key or a value.
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
        kept = config.cached_heads(layout.tp)
        of_layer = sum(heads * channels for heads, channels in kept) * bytes_each
        is_t5 = config.model_type == "t5"
        decoding = sum(layer >= config.num_layers for layer in layers) if is_t5 else len(layers)
        stages.append(
            InferenceMemory(
                weights=weights * bytes_each,
                kv_per_token=decoding * of_layer,
                kv_per_source_token=decoding * of_layer if is_t5 else 0.0,
                tokens=tokens,
                source_tokens=config.seq_length if is_t5 else 0,
            )
        )
    return max(stages, key=lambda stage: stage.weights + stage.per_request)
