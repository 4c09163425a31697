"""What a GPT is made of, under Megatron-LM's names, and the numbers that follow from it.

Standard library only: a stage reads it before torch, and `plan` never needs torch at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.errors import ConfigError

PositionEmbeddingType = Literal["learned_absolute", "rope", "none"]
Normalization = Literal["LayerNorm", "RMSNorm"]

POSITIVE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "num_query_groups",
    "seq_length",
    "max_position_embeddings",
    "rotary_base",
    "norm_epsilon",
    "init_method_std",
    "make_vocab_size_divisible_by",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """A decoder-only transformer: GPT-2 and GPT-3, Llama, Mistral, Qwen2 and their kind."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Query heads of each layer."""
    ffn_hidden_size: int | None = None
    """Width inside the MLP; unset: 4 x hidden size, with --swiglu 8/3 of it in steps of 64."""
    kv_channels: int | None = None
    """Width of one attention head; unset: hidden size / attention heads."""
    group_query_attention: bool = False
    """Let several query heads share one key and value head."""
    num_query_groups: int = 1
    """Key and value heads under --group-query-attention."""
    seq_length: int
    """Tokens of a training sample."""
    max_position_embeddings: int | None = None
    """Longest sequence that positions exist for; unset: the sequence length."""
    position_embedding_type: PositionEmbeddingType = "learned_absolute"
    """How a token knows its place: a learned table, rotary embedding, or not at all."""
    rotary_base: float = 10000.0
    """Base of the rotary wavelengths (theta)."""
    rotary_percent: float = 1.0
    """Share of each head's channels that rotate."""
    normalization: Normalization = "LayerNorm"
    """Normalisation before attention, before the MLP and at the end."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside a normalisation."""
    swiglu: bool = False
    """Gated MLP, silu(gate) x up, in place of GELU (its tanh form)."""
    disable_bias_linear: bool = False
    """Leave the biases of linear layers out."""
    add_qkv_bias: bool = False
    """Keep the bias of the QKV projection where --disable-bias-linear drops the others."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own."""
    hidden_dropout: float = 0.1
    """Dropout after the embedding, attention and the MLP."""
    attention_dropout: float = 0.1
    """Dropout on attention weights."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this, times the tensor-parallel size."""

    def __post_init__(self) -> None:
        """Refuse what cannot be built, in words."""
        self._check_positive()
        self._check_ranges()
        self._check_heads()
        self._check_positions()

    # --- validation -----------------------------------------------------------------------

    def _check_positive(self) -> None:
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{_flag(name)} must be above 0, got {value}")

    def _check_ranges(self) -> None:
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{_flag(name)} must be in [0, 1), got {getattr(self, name)}")
        if not 0.0 < self.rotary_percent <= 1.0:
            raise ConfigError(f"--rotary-percent must be in (0, 1], got {self.rotary_percent}")

    def _check_heads(self) -> None:
        heads, groups = self.num_attention_heads, self.num_query_groups
        if self.kv_channels is None and self.hidden_size % heads:
            raise ConfigError(
                f"--hidden-size ({self.hidden_size}) must be divisible by --num-attention-heads "
                f"({heads}); or give the width of a head with --kv-channels"
            )
        if not self.group_query_attention and groups != 1:
            raise ConfigError(
                f"--num-query-groups {groups} has no effect without --group-query-attention; "
                "add that flag or leave the number out"
            )
        if self.group_query_attention and heads % groups:
            raise ConfigError(
                f"--num-attention-heads ({heads}) must be divisible by "
                f"--num-query-groups ({groups})"
            )

    def _check_positions(self) -> None:
        if self.positions < self.seq_length:
            raise ConfigError(
                f"--max-position-embeddings ({self.positions}) must be at least --seq-length "
                f"({self.seq_length})"
            )
        if self.position_embedding_type == "rope" and (self.rotary_dim % 2 or not self.rotary_dim):
            raise ConfigError(
                f"--rotary-percent {self.rotary_percent} of a head of {self.head_dim} channels "
                f"gives {self.rotary_dim} rotating channels; it must be an even number above 0"
            )

    # --- derived --------------------------------------------------------------------------

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key and value heads: as many as query heads unless grouped."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.head_dim * self.num_attention_heads

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (values alike)."""
        return self.head_dim * self.query_groups

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rotate."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP, given or derived."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return max(int(self.hidden_size * 8 / 3 / 64), 1) * 64
        return 4 * self.hidden_size

    @property
    def positions(self) -> int:
        """Longest sequence the model can see."""
        return self.max_position_embeddings or self.seq_length

    @property
    def linear_bias(self) -> bool:
        """Whether linear layers other than QKV have a bias."""
        return not self.disable_bias_linear

    @property
    def qkv_bias(self) -> bool:
        """Whether the QKV projection has a bias."""
        return self.linear_bias or self.add_qkv_bias

    def padded_vocab_size(self, vocab_size: int, tensor_parallel_size: int = 1) -> int:
        """Rows of the embedding for a tokenizer of `vocab_size` tokens."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-vocab_size // multiple) * multiple

    def num_params(self, padded_vocab_size: int) -> int:
        """Every trained number, exactly: what `GPTModel.parameters()` sums to."""
        h = self.hidden_size
        embedding = padded_vocab_size * h
        if self.position_embedding_type == "learned_absolute":
            embedding += self.positions * h
        output = padded_vocab_size * h if self.untie_embeddings_and_output_weights else 0
        return embedding + self.num_layers * self._layer_params() + self._norm_params() + output

    def _norm_params(self) -> int:
        return self.hidden_size * (2 if self.normalization == "LayerNorm" else 1)

    def _layer_params(self) -> int:
        h, f = self.hidden_size, self.ffn_size
        qkv, fc1 = self.query_size + 2 * self.kv_size, f * (2 if self.swiglu else 1)
        weights = qkv * h + self.query_size * h + fc1 * h + f * h
        biases = (qkv if self.qkv_bias else 0) + (2 * h + fc1 if self.linear_bias else 0)
        return weights + biases + 2 * self._norm_params()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
