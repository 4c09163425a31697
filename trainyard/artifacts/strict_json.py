"""A strict JSON parser for untrusted files: unique names, finite numbers, bounded depth and size.

Refuses, with an error that names the file, a name given twice (two readers may take either), NaN
(not JSON), 1e999 (overflows) and a thousand brackets (exhausts a parser)."""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from typing import Any

from trainyard.errors import ArtifactError

MAX_DEPTH = 50
"""Of nested tables and lists; trainyard's own documents are far below it."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


INFINITY = {"__float__": "Infinity"}
"""A number without bound, as `transformers` writes it into JSON: no number to whoever wants one."""


def parse_json(data: bytes, url: str, *, infinity: bool = False) -> Any:
    """The document in the bytes of a file. Raises ArtifactError naming it. infinity: take the word
    Infinity for INFINITY."""
    try:
        return json.loads(
            data,
            object_pairs_hook=_table,
            parse_constant=_infinity if infinity else _refuse_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise ArtifactError(f"{url}: not a JSON document: nested too deeply") from None
    except ValueError as error:  # of JSON, of UTF-8, of a number with thousands of digits
        raise ArtifactError(f"{url}: not a JSON document: {error}") from error


def check_depth(document: Any, url: str) -> None:
    """Refuse a document that a recursive function could not traverse."""
    level, depth = [document], 0
    while level:
        if depth > MAX_DEPTH:
            raise ArtifactError(f"{url}: nested too deeply")
        inner = (list(v.values()) if isinstance(v, dict) else v for v in level)
        level = [item for v in inner if isinstance(v, list) for item in v]
        depth += 1


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{shown(twice)} is given twice")
    return table


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _infinity(name: str) -> dict[str, str]:
    if name != "Infinity":
        raise ValueError(f"{name} is not a number of JSON")
    return INFINITY


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is not finite")
    return value


def shown(value: Any) -> str:
    """A value in a message, cut to one line."""
    return _SHORT.repr(value)


# --- values -----------------------------------------------------------------------------------


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
