"""What an update of parameters takes, and what a rule of updates is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class UpdateTerms(NamedTuple):
    """Rates and scale of one update."""

    learning_rate: float
    weight_decay: float
    num_updates: int
    """From 1, this one included."""
    grad_scale: float = 1.0
    """What the gradients are to be divided by; their memory may be used for that."""


class Moment(NamedTuple):
    """A state tensor of a parameter, initially zero."""

    name: str
    dtype: torch.dtype | None = None
    """Between steps; None: that of the main parameter."""


Spans = tuple[tuple[int, int], ...]
"""Runs of places in flat memory, each from its first number to before its last."""


class FlatTensors(NamedTuple):
    """The tensors of a bucket's piece, of one length."""

    grads: Tensor
    """fp32 or 16 bits."""
    main: Tensor
    """fp32."""
    moments: tuple[Tensor, ...]
    """fp32 or bf16."""
    params: Tensor | None
    """16 bits, to be written from `main`; None: the model has `main` itself."""


class FlatRule(Protocol):
    """A rule that updates flat memory in one pass."""

    def update(self, flat: FlatTensors, spans: Spans, terms: UpdateTerms) -> None:
        """Change main, moments and params in place, in `spans` only."""


class UpdateRule(Protocol):
    """One kind of optimizer."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of its state tensors of each parameter, initially zero."""

    @property
    def flat(self) -> FlatRule | None:
        """The same rule for flat memory, if it has one for this device."""

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        moments: Sequence[list[Tensor]],
        terms: UpdateTerms,
    ) -> None:
        """Change parameters and moments in place."""
