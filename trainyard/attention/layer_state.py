"""What a layer keeps of a text in place of keys and values: a state of fixed size, such as that of
Mamba-2.

A layer says how the new tokens of some texts change their states; whoever holds the states says
which tokens belong to which text. Neither knows the other. b texts, s new tokens of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Inputs = tuple[Tensor, ...]
"""(b, s, ...) each, what the tokens bring."""
State = tuple[Tensor, ...]
"""(b, ...) each, of the shapes of `TransformerConfig.state_shapes`."""
Advance = Callable[[Inputs, State, Tensor | None], tuple[Tensor, State]]
"""(inputs, states before, counts) -> what the layer answers to each token, (b, s, ...), and the
states after them. counts: (b) int64, tokens of each text; those after them are padding, which may
hold anything and changes no state. None: there is no padding."""


class StateCache(Protocol):
    """The states of all texts, before the new tokens of a pass."""

    def through(self, layer: int, inputs: Inputs, advance: Advance) -> Tensor:
        """Move the states of a layer on by the new tokens; the answers to these.

        inputs: (b, s, ...) as the tokens stand in the pass, and so do the answers."""
