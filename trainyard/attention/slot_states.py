"""States of any number of sequences in slots, of which a step computes the next tokens.

As in `paged_cache`, the tokens of a step are one row: those of one sequence behind those of
another. T tokens, r sequences of a group, c tokens of its longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from trainyard.attention.layer_state import Advance, Inputs, State


class Ragged(NamedTuple):
    """Where the tokens of a group stand in the step."""

    counts: Tensor
    """(r) int64, tokens of each sequence."""
    places: Tensor
    """(r, c) int64, of each token in the step; behind a sequence, of its last one."""
    rows: Tensor
    """(n) int64, numbers in a flat (r c) of what is no padding."""
    written: Tensor
    """(n) int64, the places of these in the step."""


class StateGroup(NamedTuple):
    """Sequences of a step that are computed together."""

    slots: Tensor
    """(r) int64."""
    ragged: Ragged | None = None
    """None: a token of each sequence, and these are all tokens of the step."""


class SlotStates:
    """A state in each slot, changed in place. Implements `layer_state.StateCache`."""

    groups: Sequence[StateGroup]
    """Of the step that is computed: each token is in one of them."""

    def __init__(self, held: Mapping[int, State]) -> None:
        """held: of each layer that has states; one slot more than sequences, for tokens that belong
        to none."""
        self._held = held

    @property
    def is_empty(self) -> bool:
        """Whether no layer has states."""
        return not self._held

    @property
    def scratch(self) -> int:
        """The slot that no sequence has."""
        return len(next(iter(self._held.values()))[0]) - 1

    def clear(self, slots: Tensor) -> None:
        """Make the states of these slots, (r) int64, those before a first token."""
        for kept in self.tensors():
            kept.index_fill_(0, slots, 0)

    def tensors(self) -> list[Tensor]:
        """The states of all layers."""
        return [kept for held in self._held.values() for kept in held]

    def through(self, layer: int, inputs: Inputs, advance: Advance) -> Tensor:
        """See `StateCache`; inputs and answers are (1, T, ...)."""
        held = self._held[layer]
        first = self.groups[0]
        if first.ragged is None:
            own = tuple(tensor.transpose(0, 1) for tensor in inputs)
            return _advanced(held, first.slots, own, advance, None).transpose(0, 1)
        answers: Tensor | None = None
        for slots, ragged in self.groups:
            assert ragged is not None, "a group without places has all tokens"
            own = tuple(tensor[0, ragged.places] for tensor in inputs)
            found = _advanced(held, slots, own, advance, ragged.counts).flatten(0, 1)
            if answers is None:
                answers = found.new_empty(inputs[0].shape[1], *found.shape[1:])
            answers[ragged.written] = found[ragged.rows]
        assert answers is not None, "a step has tokens"
        return answers.unsqueeze(0)


def _advanced(
    held: State, slots: Tensor, inputs: Inputs, advance: Advance, counts: Tensor | None
) -> Tensor:
    """Move the states of these slots on."""
    answers, behind = advance(inputs, tuple(kept[slots] for kept in held), counts)
    for kept, new in zip(held, behind, strict=True):
        kept[slots] = new
    return answers
