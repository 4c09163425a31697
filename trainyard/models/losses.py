"""What the last stage of a model returns in training, if it is more than a loss of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a micro-batch, which are added up."""

    of_tokens: Tensor
    """(b, s_local) fp32, not masked."""
    means: Mapping[str, Tensor]
    """() fp32 each, means over the micro-batch, by the names in the log."""
