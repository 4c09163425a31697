"""The signature of all attention backends.

b batch, n query heads, g key and value heads, s queries, t keys, d head channels, d_v channels of a
value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from trainyard.attention.masks import AttentionMask


class Softmax(NamedTuple):
    """The softmax over the scores of a layer."""

    scale: float
    """Factor of the scores."""
    dropout_p: float = 0.0
    sink: Tensor | None = None
    """(n) score of one more key of each head, whose value is 0."""
    bias: Tensor | None = None
    """(1, n, s, t) added to the scores, as relative positions are; not with a sink."""


class AttentionBackend(Protocol):
    """Softmax attention by some kernel."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax
    ) -> Tensor:
        """q: (b, n, s, d); k: (b, g, t, d); v: (b, g, t, d_v), query head i reading group i g / n.

        Returns (b, n, s, d_v)."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Numerics that only unfused attention can change."""

    softmax_in_fp32: bool = False
    layer_scaling: int = 1
    """Divide scores by this before they leave the matrix product, and undo it in the softmax."""
