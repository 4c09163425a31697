"""Boxes of global tensors that several ranks hold, put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor as one rank holds it."""

    name: str
    values: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole."""


def assembled(parts: Sequence[Piece]) -> dict[str, Tensor]:
    """Whole tensors. What several ranks hold must be the same bits, and nothing may be missing."""
    wholes: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for part in parts:
        whole = wholes.setdefault(part.name, torch.empty(part.shape, dtype=part.values.dtype))
        known = filled.setdefault(part.name, torch.zeros(part.shape, dtype=torch.bool))
        box = tuple(slice(o, o + n) for o, n in zip(part.offset, part.values.shape, strict=True))
        both = known[box]
        assert torch.equal(whole[box][both], part.values[both]), f"replicas differ: {part.name}"
        whole[box] = part.values
        known[box] = True
    missing = [name for name, known in filled.items() if not known.all()]
    assert not missing, f"no rank holds all of {missing}"
    return wholes
