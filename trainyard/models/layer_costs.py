"""What a layer costs that is not attention followed by an MLP. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Parameters of a layer, and what its forward pass keeps of a token, after selective
    recomputation."""

    split: int
    """Parameters that tensor-parallel ranks share."""
    whole: int
    """Parameters that each rank has."""
    routed: int = 0
    """Parameters of routed experts."""
    visited: int = 0
    """Of these, those that a token visits."""
    kept: float
    """Numbers in the type of the run that tensor-parallel ranks share."""
    kept_fp32: float = 0.0
    """The same for numbers that are fp32 in any run."""
    keeps_norm: bool = True
    """Whether the output of the norm is kept; its input, the residual stream, always is."""

    def kept_bytes(
        self, hidden_size: int, tp: int, between: int, width: int, residual_width: int
    ) -> float:
        """Bytes of a token on a rank. between: ranks that share what is between matrices. width,
        residual_width: bytes of a number of the run, and of the residual stream."""
        stream = hidden_size * (residual_width + (width if self.keeps_norm else 0))
        return stream / between + (width * self.kept + 4 * self.kept_fp32) / tp
