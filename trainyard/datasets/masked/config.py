"""Options of data with hidden words. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedConfig:
    """Options of BERT and T5 data, under Megatron-LM's names."""

    mask_prob: float = 0.15
    """Share of the tokens of a sample that the model must predict."""
    short_seq_prob: float = 0.1
    """Share of the samples that are cut to a random shorter length."""

    def __post_init__(self) -> None:
        """Refuse shares outside 0 to 1."""
        if not 0 < self.mask_prob < 1:
            raise ConfigError(f"--mask-prob must be between 0 and 1, got {self.mask_prob}")
        if not 0 <= self.short_seq_prob <= 1:
            raise ConfigError(f"--short-seq-prob must be from 0 to 1, got {self.short_seq_prob}")
