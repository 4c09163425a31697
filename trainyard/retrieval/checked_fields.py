"""Checks the fields of a dataclass that was made of another program's document."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")

KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
MOST = 2**63


def check_fields(part: T) -> T:
    """The same. Raises ValueError for a field that is no text or number as its annotation says, and
    for a number below 0 or beyond 64 bits. Fields of other types are not looked at."""
    for field in fields(part):  # type: ignore[arg-type]
        kind = KINDS.get(str(field.type))
        value: Any = getattr(part, field.name)
        if kind is None:
            continue
        if type(value) not in kind:  # a bool is no number
            raise ValueError(f"{field.name} is {value!r:.60}")
        if not isinstance(value, str) and not 0 <= value < MOST:
            raise ValueError(f"{field.name} is {value!r:.60}")
    return part
