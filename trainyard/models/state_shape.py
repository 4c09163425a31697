"""The size of what a layer keeps of a text in place of keys and values (`attention.layer_state`).
Standard library only."""

from __future__ import annotations

from typing import NamedTuple


class StateShape(NamedTuple):
    """One tensor of the state of one text."""

    shape: tuple[int, ...]
    is_fp32: bool = False
    """Whatever the type of the weights."""
