"""Options of supervised fine-tuning data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.errors import ConfigError

Packing = Literal["line", "off", "lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Conversations in place of running text."""

    sft: bool = False
    """Train on the conversations of JSONL files (--data-path names them), key "messages"."""
    sft_packing: Packing = "line"
    """line: the conversations of a line share a sample, as Megatron-LM has it; off: a line is one
    conversation and fills up a sample, as in its v0.15; lines: lines that fit share a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftFormat:
    """How conversations become a sample; the same for all sources of a run."""

    seq_length: int
    eod: int
    pad: int | None = None
    """Fills samples up; it is left out of the loss by place, so it may be any id."""
    packing: Packing = "line"
    context_parallel_size: int = 1
    """Above 1, a conversation takes a multiple of twice as many tokens: each rank has two equal
    pieces of it."""

    def __post_init__(self) -> None:
        """Refuse lengths that cannot be shared out."""
        if self.seq_length < 2:
            raise ConfigError(f"--seq-length must be at least 2, got {self.seq_length}")
        if self.seq_length % self.multiple:
            raise ConfigError(
                f"--seq-length ({self.seq_length}) must be divisible by twice "
                f"--context-parallel-size ({self.context_parallel_size})"
            )
        if self.packing == "off" and self.context_parallel_size > 1:
            raise ConfigError(
                "--sft-packing off has no bounds to share out over --context-parallel-size "
                f"({self.context_parallel_size}); use line"
            )

    @property
    def multiple(self) -> int:
        """What the tokens of a conversation are a multiple of."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def filler(self) -> int:
        """The id that fills samples up."""
        return self.eod if self.pad is None else self.pad
