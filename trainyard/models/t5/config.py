"""Options of a T5. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trainyard.config import MAX_SIZE, check_above_zero, check_at_most
from trainyard.errors import ConfigError
from trainyard.models.config import Activation, ModelType, TransformerConfig
from trainyard.models.config_checks import MAX_LAYERS
from trainyard.parallel.config import PP, TP, ParallelConfig
from trainyard.parallel.divisible import multiples, nearest
from trainyard.parallel.pipeline.partition import partition

DECODER_LAYER, CROSS_KEYS = 1.3, 0.12
"""What a layer of a decoder keeps for a token of the decoder and for one of the encoder, in parts
of what a layer of an encoder keeps for a token: 34 h bytes (arXiv:2205.05198), of which norm,
queries, context and dropout of cross-attention are 9 h more, keys and values 4 h."""

MIN_BUCKETS = 4
"""Two for each direction, of which one is exact."""


@dataclass(frozen=True, kw_only=True)
class T5Config(TransformerConfig):
    """An encoder of a text with hidden spans, and a decoder that spells them out: T5 as Megatron-LM
    trains it, or with further options as Google did.

    --num-layers and --seq-length are the encoder's."""

    RELATIVE_POSITIONS: ClassVar[bool] = True

    model_type: ModelType = "t5"
    decoder_num_layers: int | None = None
    """Layers of the decoder; unset: as many as the encoder's, --num-layers."""
    decoder_seq_length: int | None = None
    """Tokens of the decoder's part of a sample; unset: a quarter of --seq-length."""
    relative_attention_num_buckets: int = 32
    """Distances that --position-embedding-type relative tells apart."""
    relative_attention_max_distance: int = 128
    """From this distance on, all distances are one."""
    softmax_scale: float | None = None
    """Factor of the scores of attention; unset: 1 / sqrt(width of a head). Google's T5 has 1."""
    relu: bool = False
    """max(x, 0) in place of GELU."""
    geglu: bool = False
    """Gated MLP, gelu(gate) x up, with GELU in its tanh form."""
    lm_head_bias: bool = True
    """A bias in the output layer, if it shares the weights of the embedding; an output layer of its
    own never has one."""
    scale_lm_head_input: bool = False
    """Multiply what enters the output layer by 1 / sqrt(hidden size), as Google's first T5 does."""

    def __post_init__(self) -> None:
        """Raise ConfigError for options that contradict each other or cannot be built."""
        counts = ("decoder_num_layers", "decoder_seq_length")
        buckets = ("relative_attention_num_buckets", "relative_attention_max_distance")
        check_above_zero(self, *counts, *buckets, "softmax_scale")
        check_at_most(self, MAX_SIZE, "decoder_seq_length", *buckets)
        check_at_most(self, MAX_LAYERS, "decoder_num_layers")
        super().__post_init__()
        self._check_attention()
        if self.positions < self.decoder_length:
            raise ConfigError(
                f"--max-position-embeddings ({self.positions}) must be at least "
                f"--decoder-seq-length ({self.decoder_length})"
            )
        if self.recompute_num_layers is not None:
            shallow = min(self.num_layers, self.decoder_layers)
            if self.recompute_num_layers > shallow:
                raise ConfigError(
                    f"--recompute-num-layers ({self.recompute_num_layers}) must be at most "
                    f"{shallow}, the layers of the encoder and of the decoder"
                )

    def _check_attention(self) -> None:
        if self.window_size is not None:
            raise ConfigError(
                f"--window-size {self.window_size}: a T5 looks at all tokens; leave it out"
            )
        if self.position_embedding_type != "relative":
            return
        buckets, distance = (
            self.relative_attention_num_buckets,
            self.relative_attention_max_distance,
        )
        if buckets % 2 or buckets < MIN_BUCKETS:
            raise ConfigError(
                f"--relative-attention-num-buckets must be even and at least {MIN_BUCKETS}, got "
                f"{buckets}"
            )
        if distance <= buckets // 2:
            raise ConfigError(
                f"--relative-attention-max-distance ({distance}) must be above half of "
                f"--relative-attention-num-buckets ({buckets}), which are exact distances"
            )
        kernel = "flash" if self.use_flash_attn else self.attention_backend
        if kernel in ("flash", "fused"):
            raise ConfigError(
                f"--attention-backend {kernel} adds nothing to scores, as "
                "--position-embedding-type relative does; use --attention-backend auto or unfused"
            )
        if self.softmax_type != "vanilla":
            raise ConfigError(
                f"--softmax-type {self.softmax_type} does not go with --position-embedding-type "
                "relative; leave one of them out"
            )

    # --- sizes ----------------------------------------------------------------------------

    @property
    def decoder_layers(self) -> int:
        """Layers of the decoder, given or derived."""
        return self.num_layers if self.decoder_num_layers is None else self.decoder_num_layers

    @property
    def decoder_length(self) -> int:
        """Tokens of the decoder's part of a sample, given or derived."""
        if self.decoder_seq_length is not None:
            return self.decoder_seq_length
        return max(self.seq_length // 4, 1)

    @property
    def output_length(self) -> int:
        """Tokens of a sample with logits: the decoder's."""
        return self.decoder_length

    @property
    def all_layers(self) -> int:
        """Encoder and decoder, in this order over the pipeline stages."""
        return self.num_layers + self.decoder_layers

    @property
    def stream_length(self) -> int:
        """Stages pass the encoder's hidden states and the decoder's behind them."""
        return self.seq_length + self.decoder_length

    @property
    def part_lengths(self) -> Mapping[str, int]:
        """Of encoder and decoder."""
        return {"--seq-length": self.seq_length, "--decoder-seq-length": self.decoder_length}

    @property
    def attention_scale(self) -> float:
        """Factor of the scores of attention, given or derived."""
        return 1.0 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale

    @property
    def activation(self) -> Activation:
        """Function between the matrices of the MLP."""
        if self.geglu:
            return "geglu_tanh"
        return "relu" if self.relu else super().activation

    @property
    def gated(self) -> bool:
        """Whether the first matrix of the MLP is two, gate and up."""
        return self.geglu or super().gated

    @property
    def has_output_bias(self) -> bool:
        """Whether the output layer has a bias."""
        return self.lm_head_bias and not self.untie_embeddings_and_output_weights

    def num_cross_layers(self, layers: range) -> int:
        """Those of the decoder."""
        return len(layers) - len(range(layers.start, min(layers.stop, self.num_layers)))

    def equal_layers(self, layers: range) -> float:
        """Layers over the encoder's tokens that keep as much as these, for estimates."""
        across = self.num_cross_layers(layers)
        ratio = self.decoder_length / self.seq_length
        return len(layers) - across + across * (DECODER_LAYER * ratio + CROSS_KEYS)

    # --- parameters -----------------------------------------------------------------------

    def all_layer_params(self) -> int:
        """The encoder's and the decoder's."""
        return self.all_layers * self.layer_params() + self.decoder_layers * self.cross_params()

    def cross_params(self) -> int:
        """Trained parameters of one cross-attention and its norm."""
        h = self.hidden_size
        weights = 2 * self.query_size * h + 2 * self.kv_size * h
        biases = self.query_size + 2 * self.kv_size + h if self.linear_bias else 0
        sinks = self.num_attention_heads if self.softmax_type == "learnable" else 0
        return weights + biases + sinks + self.norm_params()

    def embedding_params(self) -> int:
        """Learned positions, which encoder and decoder share, or a table of distances for each."""
        if self.position_embedding_type != "relative":
            return super().embedding_params()
        return 2 * self.relative_attention_num_buckets * self.num_attention_heads

    def output_params(self, rows: int) -> int:
        """The final norms of encoder and decoder, and the bias of the vocabulary."""
        return 2 * self.norm_params() + (rows if self.has_output_bias else 0)

    # --- checks ---------------------------------------------------------------------------

    def check_parallel(self, parallel: ParallelConfig) -> None:
        """Raise ConfigError for degrees of parallelism that a T5 has no model for."""
        super().check_parallel(parallel)
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        if parallel.sequence_parallel and self.decoder_length % tp:
            raise ConfigError(
                f"--decoder-seq-length ({self.decoder_length}) must be divisible by {TP} ({tp}) "
                "under --sequence-parallel; "
                f"{nearest('--decoder-seq-length', multiples(self.decoder_length, tp))}"
            )
        if pp > 1 and self.position_embedding_type == "relative":
            raise ConfigError(
                f"{PP} ({pp}): every layer of a T5 with --position-embedding-type relative uses "
                f"one table of distances, which stages do not share; use {TP}, or "
                "--position-embedding-type learned_absolute"
            )
        try:
            partition(parallel, self.all_layers)
        except ConfigError as error:
            raise ConfigError(
                f"stages share the encoder's layers ({self.num_layers}) and then the decoder's "
                f"({self.decoder_layers}), {self.all_layers} in all: {error}"
            ) from error
