"""States of a fixed batch of sequences, of layers that keep no keys and values, such as Mamba-2.

b batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainyard.attention.layer_state import Advance, Inputs, State
from trainyard.models.config import TransformerConfig


def empty_states(
    config: TransformerConfig,
    rows: int,
    *,
    layers: range,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[int, State]:
    """States before the first token of this many sequences, of those of these layers that have one.
    dtype: of weights."""
    return {
        layer: tuple(
            torch.zeros(
                (rows, *one.shape), dtype=torch.float32 if one.is_fp32 else dtype, device=device
            )
            for one in shapes
        )
        for layer in layers
        if (shapes := config.state_shapes(layer, tp_size))
    }


class StaticStates:
    """A state for each row of the batch, changed in place. Implements
    `attention.layer_state.StateCache`."""

    def __init__(self, held: dict[int, State]) -> None:
        self._held = held
        self.counts: Tensor | None = None
        """(b) int64, tokens of each row in the pass that is computed; None: all of them count."""

    @property
    def size_bytes(self) -> int:
        """Memory of all states."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def through(self, layer: int, inputs: Inputs, advance: Advance) -> Tensor:
        """See `StateCache`."""
        held = self._held[layer]
        answers, behind = advance(inputs, held, self.counts)
        for kept, new in zip(held, behind, strict=True):
            kept.copy_(new)
        return answers

    def clear(self) -> None:
        """Forget all tokens, for a next batch."""
        for tensor in self._tensors():
            tensor.zero_()

    def of_rows(self, rows: slice) -> StaticStates:
        """These rows alone, in the same memory."""
        held = {layer: tuple(x[rows] for x in state) for layer, state in self._held.items()}
        return StaticStates(held)

    def reorder(self, order: Tensor) -> None:
        """Row i becomes a copy of row `order[i]`."""
        self._held = {
            layer: tuple(tensor.index_select(0, order) for tensor in held)
            for layer, held in self._held.items()
        }

    def copies(self) -> list[Tensor]:
        """Of all states as they are, for `put_back`."""
        return [tensor.clone() for tensor in self._tensors()]

    def put_back(self, copies: Sequence[Tensor]) -> None:
        """Make the states what they were."""
        for tensor, copy in zip(self._tensors(), copies, strict=True):
            tensor.copy_(copy)

    def _tensors(self) -> Iterator[Tensor]:
        for held in self._held.values():
            yield from held
