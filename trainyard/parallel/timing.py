"""How parts of a step are timed by whoever wants to: the parts only name themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Timed = Callable[[str], AbstractContextManager[object]]
"""`with timed("forward-compute"): ...`, by Megatron-LM's names."""

_NOTHING = nullcontext()


def untimed(name: str) -> AbstractContextManager[object]:
    """Nobody asks for times."""
    return _NOTHING
