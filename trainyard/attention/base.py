"""The signature of all attention backends.

b batch, n query heads, g key and value heads, s queries, t keys, d head channels, d_v channels of a
value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trainyard.attention.masks import AttentionMask


class AttentionBackend(Protocol):
    """Softmax attention by some kernel."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        *,
        dropout_p: float,
        scale: float,
        sink: Tensor | None = None,
    ) -> Tensor:
        """q: (b, n, s, d); k: (b, g, t, d); v: (b, g, t, d_v), query head i reading group i g / n.

        sink: (n) score of one more key of each head, whose value is 0. Returns (b, n, s, d_v)."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Numerics that only unfused attention can change."""

    softmax_in_fp32: bool = False
    layer_scaling: int = 1
    """Divide scores by this before they leave the matrix product, and undo it in the softmax."""
