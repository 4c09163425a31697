"""Values of a document that may come from anywhere: of the right kind and bounded, or a ValueError.

`trainyard.artifacts.strict_json` parses the document."""

from __future__ import annotations

from typing import Any

from trainyard.artifacts.strict_json import shown

MAX_DIMS = 64
"""As torch has it."""

MAX_COUNT = 2**63 - 1


def counts(values: Any) -> tuple[int, ...]:
    """A shape or an offset: at most 64 whole numbers from 0 on. Raises ValueError for others."""
    is_list = isinstance(values, list) and len(values) <= MAX_DIMS
    if not is_list or any(type(v) is not int or not 0 <= v <= MAX_COUNT for v in values):
        raise ValueError(f"{shown(values)} is not a list of counts")
    return tuple(values)


def text(value: Any) -> str:
    """A string. Raises ValueError for anything else, which str() would make one of."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a string")
    return value
