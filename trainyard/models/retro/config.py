"""Options of a Retro. Standard library only.

l chunks of a sample, m tokens of a chunk, k neighbours, r tokens of a neighbour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from trainyard.config import MAX_SIZE, also, check_at_least, check_at_most
from trainyard.errors import ConfigError
from trainyard.models.config import ModelType, TransformerConfig
from trainyard.models.config_checks import MAX_LAYERS
from trainyard.models.gpt.config import GPTConfig, check_own_layers
from trainyard.parallel.config import CP, TP, ParallelConfig
from trainyard.retrieval.shape import NeighborShape

SHALLOW = 15
"""Layers up to which cross attention begins early."""
EARLY, LATE, EVERY = 6, 9, 3
"""First layer with cross attention of a shallow and of a deep model, and the distance to the
next."""

CROSS_QUERIES, CROSS_KEYS = 0.4, 0.2
"""What cross attention keeps for a query, and for a key, of what a layer keeps for a token."""


@dataclass(frozen=True, kw_only=True)
class RetroConfig(GPTConfig):
    """A GPT that attends to neighbours of its text from a database: Retro (arXiv:2112.04426) as
    Megatron-LM trained it."""

    model_type: ModelType = "retro"
    retro_chunk_length: int = also("retro_gpt_chunk_length", default=64)
    """Tokens of a chunk, as in the chunk database."""
    retro_num_neighbors: int = 2
    """Neighbours of each chunk of a sample."""
    retro_num_retrieved_chunks: int = 2
    """Chunks of a neighbour: itself and those that follow it in its document."""
    retro_encoder_layers: int = also("retro_encoder_num_layers", default=2)
    """Layers of the encoder of neighbours."""
    retro_encoder_hidden_dropout: float = 0.1
    """Dropout after attention and MLP in the encoder."""
    retro_encoder_attention_dropout: float = 0.1
    """Dropout on attention weights in the encoder."""
    retro_attention_gate: float = 1.0
    """Factor of cross attention before it is added to the residual stream."""
    retro_no_final_layernorm: bool = False
    """No norm after the last layer, as in Megatron core from 0.8 on."""
    retro_cross_attention_layers: tuple[int, ...] = ()
    """Layers with cross attention, from 1, ascending. Unset: every third from layer 6, or from
    layer 9 in a model of more than 15 layers."""

    def __post_init__(self) -> None:
        """Raise ConfigError for options that contradict each other or cannot be built."""
        check_own_layers(self)
        self._check_layers()
        sizes = (
            *("retro_chunk_length", "retro_num_neighbors", "retro_num_retrieved_chunks"),
            "retro_encoder_layers",
        )
        check_at_least(self, 1, *sizes)
        check_at_most(self, MAX_SIZE, *sizes[:3])
        check_at_most(self, MAX_LAYERS, "retro_encoder_layers")
        for name in ("retro_encoder_hidden_dropout", "retro_encoder_attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be in [0, 1), got {getattr(self, name)}")
        super().__post_init__()
        if self.experts.enabled:
            raise ConfigError(
                f"--num-experts ({self.experts.num_experts}) is not for --model-type retro, whose "
                "layers have dense MLPs; leave it out"
            )
        self._check_lengths()
        if self.cpu_offloading_num_layers:
            raise ConfigError(
                f"--cpu-offloading-num-layers {self.cpu_offloading_num_layers} is not for "
                "--model-type retro, whose layers share the encoded neighbours; use "
                "--recompute-granularity full"
            )

    def _check_layers(self) -> None:
        given, count = self.retro_cross_attention_layers, self.num_layers
        if list(given) != sorted(set(given)) or (given and not 1 <= given[0] <= given[-1] <= count):
            raise ConfigError(
                f"--retro-cross-attention-layers {' '.join(map(str, given))}: give layers from 1 "
                f"to --num-layers ({count}), ascending, each once"
            )
        if not given and count < EARLY:
            raise ConfigError(
                f"--num-layers {count}: Retro's cross attention begins at layer {EARLY}; give at "
                f"least {EARLY} layers, or name others with --retro-cross-attention-layers"
            )

    def _check_lengths(self) -> None:
        m, r = self.retro_chunk_length, self.retrieved_length
        if self.seq_length % m:
            raise ConfigError(
                f"--seq-length ({self.seq_length}) must be a multiple of --retro-chunk-length "
                f"({m}), as a sample is cut into chunks"
            )
        if self.position_embedding_type == "learned_absolute" and self.positions < r:
            raise ConfigError(
                f"--max-position-embeddings ({self.positions}) must be at least the tokens of a "
                f"neighbour, --retro-num-retrieved-chunks ({self.retro_num_retrieved_chunks}) x "
                f"--retro-chunk-length ({m}) = {r}"
            )

    def check_parallel(self, parallel: ParallelConfig) -> None:
        """Raise ConfigError for degrees of parallelism that a Retro has no model for."""
        super().check_parallel(parallel)
        cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
        if cp > 1:
            raise ConfigError(
                f"{CP} ({cp}) does not apply with --model-type retro, as the chunks of a sample "
                f"are not cut over ranks; use {TP} with --sequence-parallel"
            )
        if parallel.sequence_parallel and self.retrieved_length % tp:
            raise ConfigError(
                f"--sequence-parallel: the tokens of a neighbour ({self.retrieved_length}) must be "
                f"divisible by {TP} ({tp})"
            )

    # --- derived values -------------------------------------------------------------------

    @property
    def cross_layers(self) -> tuple[int, ...]:
        """Layers with cross attention, from 0, given or by Megatron-LM's rule."""
        if self.retro_cross_attention_layers:
            return tuple(layer - 1 for layer in self.retro_cross_attention_layers)
        first = EARLY if self.num_layers <= SHALLOW else LATE
        return tuple(range(first - 1, self.num_layers, EVERY))

    def num_cross_layers(self, layers: range) -> int:
        """Those of the decoder; the encoder's is counted with its layers."""
        return sum(layer in layers for layer in self.cross_layers)

    def num_inner_layers(self, layers: range) -> int:
        """Layers of the encoder, which is in the first layer with cross attention."""
        return self.retro_encoder_layers if self.cross_layers[0] in layers else 0

    def equal_layers(self, layers: range) -> float:
        """Layers over the tokens of the sample that keep as much as these, for estimates: a token
        of a neighbour counts in the encoder as one of the sample does in the decoder."""
        ratio = self.neighbor_tokens / self.seq_length
        across = self.num_cross_layers(layers) * (CROSS_QUERIES + CROSS_KEYS * ratio)
        inner = self.num_inner_layers(layers)
        return len(layers) + across + inner * ratio + bool(inner) * CROSS_QUERIES * ratio

    @property
    def num_chunks(self) -> int:
        """Chunks of a sample (l)."""
        return self.neighbor_shape().chunks_per_sample

    @property
    def retrieved_length(self) -> int:
        """Tokens of a neighbour (r), those that follow it included."""
        return self.neighbor_shape().retrieved_length

    @property
    def neighbor_tokens(self) -> int:
        """Tokens of all neighbours of a sample (l k r)."""
        return self.num_chunks * self.retro_num_neighbors * self.retrieved_length

    def neighbor_shape(self) -> NeighborShape:
        """What a sample retrieves."""
        return NeighborShape(
            seq_length=self.seq_length,
            chunk_length=self.retro_chunk_length,
            num_neighbors=self.retro_num_neighbors,
            num_retrieved_chunks=self.retro_num_retrieved_chunks,
        )

    @property
    def stream_length(self) -> int:
        """Neighbours pass the stages behind the hidden states of the sample."""
        return self.seq_length + self.neighbor_tokens

    @property
    def part_lengths(self) -> Mapping[str, int]:
        """Of the sample, and of what it retrieves."""
        return {"--seq-length": self.seq_length, "tokens of all neighbours": self.neighbor_tokens}

    def decoder(self) -> GPTConfig:
        """Options of the GPT that it is without neighbours."""
        values = {field.name: getattr(self, field.name) for field in fields(GPTConfig)}
        return GPTConfig(**values | {"model_type": "gpt"})

    def encoder(self) -> GPTConfig:
        """Options of a layer of the encoder: those of the decoder, with its own dropout, without
        positions and without a window, as in Megatron-LM."""
        return replace(
            self.decoder(),
            hidden_dropout=self.retro_encoder_hidden_dropout,
            attention_dropout=self.retro_encoder_attention_dropout,
            position_embedding_type="none",
            window_size=None,
            window_attn_skip_freq=None,
            use_rope_scaling=False,
        )

    # --- parameters -----------------------------------------------------------------------

    def num_params(self, padded_vocab_size: int) -> int:
        """Exact number of trained parameters, cross attention and encoder included."""
        encoder = self.retro_encoder_layers * self.layer_params() + self.cross_params()
        cross = len(self.cross_layers) * self.cross_params()
        return super().num_params(padded_vocab_size) + encoder + cross

    def output_params(self, rows: int) -> int:
        """Trained parameters behind the layers, without a table of which a rank has `rows`."""
        norm = self.norm_params() if self.retro_no_final_layernorm else 0
        return super().output_params(rows) - norm

    def cross_params(self) -> int:
        """Trained parameters of one cross attention and its norm."""
        return cross_attention_params(self) + self.norm_params()


def cross_attention_params(config: TransformerConfig) -> int:
    """Trained parameters of `models.cross_attention`."""
    h, q, kv = config.hidden_size, config.query_size, 2 * config.kv_size
    biases = q + kv + h if config.linear_bias else 0
    return h * (q + kv) + q * h + biases
