"""How a token knows its place, under Megatron-LM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.errors import ConfigError
from trainyard.models.config_sizes import MAX_SIZE, ModelSizes, check_above_zero, check_at_most

LLAMA3_LENGTH = 8192
"""From which Llama 3.1 stretches wavelengths: fixed in the programs of Meta and Megatron-LM."""

PositionEmbeddingType = Literal["learned_absolute", "rope", "yarn", "none"]


@dataclass(frozen=True, kw_only=True)
class PositionOptions(ModelSizes):
    """A learned table, rotary embedding in its several scalings, or nothing."""

    max_position_embeddings: int | None = None
    """Longest sequence that positions exist for; unset: the sequence length."""
    position_embedding_type: PositionEmbeddingType = "learned_absolute"
    """A learned table, rotary embedding (rope), rotary embedding stretched by YaRN (yarn), or
    none."""
    rotary_base: float = 10000.0
    """Base of the rotary wavelengths (theta)."""
    rotary_percent: float = 1.0
    """Share of each head's channels that rotate."""
    rotary_interleaved: bool = False
    """Rotate neighbouring channels together (RoFormer); otherwise channel i with i + half."""
    rotary_seq_len_interpolation_factor: float | None = None
    """Divide positions by this before they rotate (linear interpolation)."""
    use_rope_scaling: bool = False
    """Stretch long wavelengths as Llama 3.1 does."""
    rope_scaling_factor: float = 8.0
    """By how much --use-rope-scaling stretches."""
    rope_scaling_original_max_position_embeddings: int = LLAMA3_LENGTH
    """Length that the model was trained for before --use-rope-scaling; Megatron-LM has no other."""
    yarn_rotary_scaling_factor: float = 1.0
    """By how much YaRN stretches (arXiv:2309.00071)."""
    yarn_original_max_position_embeddings: int = 4096
    """Length that the model was trained for before YaRN."""
    yarn_beta_fast: float = 32.0
    """Channels that turn more often than this over the original length are left alone."""
    yarn_beta_slow: float = 1.0
    """Channels that turn less often than this over the original length are fully stretched."""
    yarn_mscale: float = 1.0
    """Growth of the attention with the logarithm of the scaling factor."""
    yarn_mscale_all_dim: float = 0.0
    """Growth that is divided out again."""
    yarn_correction_range_round_to_int: bool = True
    """Move the bounds between the kinds of channels to whole channels."""

    def _check_positions(self) -> None:
        check_above_zero(
            self,
            "max_position_embeddings",
            "rotary_base",
            "rotary_seq_len_interpolation_factor",
            "rope_scaling_factor",
            "rope_scaling_original_max_position_embeddings",
            "yarn_rotary_scaling_factor",
            "yarn_original_max_position_embeddings",
            "yarn_beta_fast",
            "yarn_beta_slow",
        )
        check_at_most(
            self,
            MAX_SIZE,
            "max_position_embeddings",
            "rope_scaling_original_max_position_embeddings",
            "yarn_original_max_position_embeddings",
        )
        if not 0.0 < self.rotary_percent <= 1.0:
            raise ConfigError(f"--rotary-percent must be in (0, 1], got {self.rotary_percent}")
        if self.positions < self.seq_length:
            raise ConfigError(
                f"--max-position-embeddings ({self.positions}) must be at least --seq-length "
                f"({self.seq_length})"
            )
        if self.rotary and (self.rotary_dim % 2 or not self.rotary_dim):
            raise ConfigError(
                f"--rotary-percent {self.rotary_percent} of a head of {self.head_dim} channels "
                f"gives {self.rotary_dim} rotating channels; it must be an even number above 0"
            )
        self._check_scaling()

    def _check_scaling(self) -> None:
        kind = self.position_embedding_type
        if self.use_rope_scaling and kind != "rope":
            raise ConfigError(
                f"--use-rope-scaling needs --position-embedding-type rope, which is {kind}; "
                "leave one of them out"
            )
        if kind == "yarn" and self.rotary_interleaved:
            raise ConfigError(
                "--rotary-interleaved has no meaning with --position-embedding-type yarn; leave it "
                "out"
            )
        if self.yarn_beta_fast < self.yarn_beta_slow:
            raise ConfigError(
                f"--yarn-beta-fast ({self.yarn_beta_fast}) must be at least --yarn-beta-slow "
                f"({self.yarn_beta_slow})"
            )

    @property
    def positions(self) -> int:
        """Longest sequence the model can see."""
        return self.max_position_embeddings or self.seq_length

    @property
    def rotary(self) -> bool:
        """Whether queries and keys rotate."""
        return self.position_embedding_type in ("rope", "yarn")

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rotate."""
        return int(self.head_dim * self.rotary_percent)
