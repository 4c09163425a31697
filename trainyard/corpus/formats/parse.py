"""Converts JSON objects to columns of text, or finds the fault of each.

Python's `json` defines what is valid, as in Megatron-LM's tool: NaN, Infinity and -Infinity are,
the last of repeated keys counts, and a lone surrogate in an escape is a fault only in a requested
text. orjson parses; `json` parses what orjson refuses. Knows nothing of files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import orjson

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
EXCERPT = 60
SHOWN_KEYS = 8

Split = Callable[[str], list[str]]
Column = tuple[list[str], list[int] | None]
"""The texts of several records, concatenated, and how many each has (None: one)."""


class FaultError(Exception):
    """The fault of a record; the caller adds the place."""


# --- many records -----------------------------------------------------------------------------


def parse_lines(
    lines: Sequence[bytes | bytearray], keys: Sequence[str], faults: dict[int, str]
) -> tuple[list[int] | None, list[Any]]:
    """The JSON documents of lines, and the positions of the lines that have one (None: all).

    Blank lines have none; the fault of a line that is not JSON goes to `faults`."""
    try:
        return None, list(map(orjson.loads, lines))
    except orjson.JSONDecodeError:
        pass
    kept: list[int] = []
    records: list[Any] = []
    for position, line in enumerate(lines):
        if not line or line.isspace():
            continue
        try:
            records.append(_parse(line, keys))
            kept.append(position)
        except FaultError as fault:
            faults[position] = str(fault)
    return kept, records


def columns(records: Sequence[Any], keys: Sequence[str], split: Split | None) -> list[Column]:
    """The texts of records under each key. `split` cuts strings into sentences; lists stay.

    Raises FaultError if any record has a fault; `check_record` finds which."""
    values = [_values(records, key) for key in keys]
    return [_flatten(column, split) for column in values]


def _values(records: Sequence[Any], key: str) -> list[Any]:
    try:
        values = [record[key] for record in records]
    except (KeyError, TypeError):
        raise FaultError from None
    kinds = set(map(type, values))
    if not kinds <= {str, list}:
        raise FaultError
    if list in kinds and not all(_is_texts(value) for value in values):
        raise FaultError
    return values


def _is_texts(value: Any) -> bool:
    return isinstance(value, str) or all(isinstance(item, str) for item in value)


def _flatten(values: list[Any], split: Split | None) -> Column:
    if split is None and set(map(type, values)) <= {str}:
        return values, None
    texts: list[str] = []
    counts = []
    for value in values:
        parts = value if isinstance(value, list) else [value] if split is None else split(value)
        texts += parts
        counts.append(len(parts))
    return texts, counts


def find_ids(records: Sequence[dict[str, Any]], key: str) -> list[str | None] | None:
    """The values of the id key, as text; None if no record has one."""
    ids = [record.get(key) for record in records]
    if set(map(type, ids)) <= {type(None)}:
        return None
    return [as_id(value) for value in ids]


def as_id(value: Any) -> str | None:
    """An id as text: a string as it is, null as None, anything else as JSON."""
    if value is None:
        return None
    text = written(value)
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def written(value: Any) -> str:
    """A string as it is, anything else as JSON, or by Python's `str` if JSON cannot express it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


# --- one record -------------------------------------------------------------------------------


def _parse(line: bytes | bytearray, keys: Sequence[str]) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    text = decode(line)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FaultError(f"not a JSON document ({error})") from None
    check_record(record, keys)
    for key in keys:
        value = record[key]
        for item in [value] if isinstance(value, str) else value:
            _check_surrogates(item)
    return record


def check_record(record: Any, keys: Sequence[str]) -> None:
    """Raise FaultError unless a record has a string, or a list of strings, under each key."""
    if not isinstance(record, dict):
        raise FaultError(
            f"a JSON {_kind(record)} where an object with the keys {list(keys)} should be"
        )
    for key in keys:
        if key not in record:
            raise FaultError(
                f"no key {key!r}, only {_keys(record)}; name the key of the text with --json-key"
            )
        value = record[key]
        if not isinstance(value, str | list):
            raise FaultError(
                f"key {key!r} holds a JSON {_kind(value)}, not a string or a list of strings"
            )
        if not _is_texts(value):
            i = next(i for i, item in enumerate(value) if not isinstance(item, str))
            raise FaultError(
                f"key {key!r} holds a JSON array whose item {i + 1} of {len(value)} is a JSON "
                f"{_kind(value[i])}, not a string"
            )


def decode(data: bytes | bytearray) -> str:
    """UTF-8 to text, without a byte order mark."""
    try:
        return data.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        raise FaultError(
            f"not UTF-8 ({error.reason} at byte {error.start} of the document)"
        ) from None


def excerpt(line: bytes | bytearray | str) -> str:
    """The beginning of a line as text, with invalid UTF-8 replaced; empty for an empty line."""
    beginning = line[: 4 * EXCERPT]
    text = beginning if isinstance(beginning, str) else beginning.decode(errors="replace")
    cut = text[:EXCERPT].rstrip("\r\n")
    return cut + ("..." if len(text) > EXCERPT else "") if cut else ""


def begins(excerpt: str) -> str:
    """An excerpt at the end of a message, in ASCII and quoted."""
    return f"; it begins {excerpt!a}" if excerpt else ""


def _check_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FaultError("an escape \\ud... that is half a character (a lone surrogate)") from None


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _keys(record: dict[str, Any]) -> str:
    shown = ", ".join(ascii(key)[:EXCERPT] for key in sorted(record)[:SHOWN_KEYS])
    return f"[{shown}{', ...' if len(record) > SHOWN_KEYS else ''}]"
