"""What the last stage of a model returns in training, if it is more than a loss of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a micro-batch, which are added up."""

    of_tokens: Tensor
    """(b, s_local) fp32, not masked."""
    means: Mapping[str, Tensor]
    """() fp32 each, means over the micro-batch, by the names in the log; under context parallelism
    the part of this rank's tokens in the mean."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Of means in the gradient; others have 1."""
    num_tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """() each, tokens of the means that are over tokens with a loss of their own."""

    def weighed(self, name: str, *, per_token: bool) -> Tensor:
        """What a mean adds to the loss of the micro-batch. per_token: a sum over tokens."""
        loss = self.means[name]
        if per_token and name in self.num_tokens:
            loss = loss * self.num_tokens[name]
        return loss * self.factors[name] if name in self.factors else loss
