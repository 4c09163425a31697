"""The sizes of a transformer, and the rules between them. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainyard.errors import ConfigError

MAX_LAYERS = 4096
"""Each has a dozen tensors, of which every checkpoint holds the names."""
MAX_SIZE = 2**31 - 1
"""Of a width, a number of heads, a length or a vocabulary: token files and kernels count in 32
bits."""
MAX_PARAMS = 10**15
"""Of a whole model; the bytes of its checkpoint still count in 64 bits."""


def flag(name: str) -> str:
    """A field as it is written on the command line."""
    return "--" + name.replace("_", "-")


def check_above_zero(config: Any, *names: str) -> None:
    """Refuse a given value that is not above 0; NaN is none."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{flag(name)} must be above 0, got {value}")


def check_at_most(config: Any, most: int, *names: str) -> None:
    """Refuse a given value that is above `most`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value > most:
            raise ConfigError(f"{flag(name)} must be at most {most}, got {value}")


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Depth, widths, heads and lengths."""

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
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this, times the tensor-parallel size."""

    def _check_sizes(self) -> None:
        check_above_zero(
            self,
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "ffn_hidden_size",
            "kv_channels",
            "num_query_groups",
            "seq_length",
            "make_vocab_size_divisible_by",
        )
        check_at_most(self, MAX_LAYERS, "num_layers")
        check_at_most(
            self,
            MAX_SIZE,
            "hidden_size",
            "num_attention_heads",
            "ffn_hidden_size",
            "kv_channels",
            "seq_length",
            "make_vocab_size_divisible_by",
        )
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

    def padded_vocab_size(self, vocab_size: int, tensor_parallel_size: int = 1) -> int:
        """Rows of the embedding for a tokenizer of `vocab_size` tokens."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-vocab_size // multiple) * multiple
