"""Calls of a project's methods, as lines of text: never evaluated, only looked up.

A line is a name and its arguments, as words or as in Python: `get_db_chunk_text 5`,
`retro.get_pt_sample_text('train', 0)`."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import numpy as np

from trainyard.config import suggest
from trainyard.errors import ConfigError
from trainyard.logging import printable
from trainyard.retrieval.retro import Retro

HIDDEN = ("open", "get_db_dataset", "get_pt_dataset")
"""Methods whose results are no text."""

MOST = 2**63

_CALL = re.compile(r"(?:retro\.)?([A-Za-z_]\w*)\s*(.*)\Z", re.DOTALL)


def methods() -> dict[str, Callable[..., Any]]:
    """The methods that can be called, by name."""
    found = inspect.getmembers(Retro, inspect.isfunction)
    return {name: m for name, m in found if not name.startswith("_") and name not in HIDDEN}


def call(project: Retro, line: str) -> Any:
    """The result of a line. Raises ConfigError for a name or an argument that does not fit,
    such as a number that no chunk has."""
    match = _CALL.match(line.strip())
    if match is None:
        raise ConfigError(f"{line.strip()!r} is no call; an example: get_db_chunk_text 0")
    name, known = match[1], methods()
    if name not in known:
        raise ConfigError(f"unknown call {name!r}; {suggest(name, known)}")
    arguments = _arguments(name, known[name], match[2])
    try:
        return known[name](project, *arguments)
    except IndexError as error:
        raise ConfigError(str(error)) from error


def _arguments(name: str, method: Callable[..., Any], text: str) -> list[Any]:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    if [one.name for one in parameters] == ["token_ids"]:
        return [[_number(name, word) for word in re.split(r"[\s,\[\]]+", text) if word]]
    if [one.name for one in parameters] == ["text"]:
        return [_unquoted(text)]
    words = _words(name, text)
    required = sum(one.default is inspect.Parameter.empty for one in parameters)
    if not required <= len(words) <= len(parameters):
        shown = ", ".join(one.name for one in parameters) or "no arguments"
        raise ConfigError(f"{name} takes {shown}; {len(words)} were given")
    return [
        _number(name, word) if one.annotation == "int" else word
        for one, word in zip(parameters, words, strict=False)
    ]


def _words(name: str, text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace += ","
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError as error:
        raise ConfigError(f"{name}: {text!r} has an open quote") from error


def _unquoted(text: str) -> str:
    text = text.strip()
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else text


def _number(name: str, word: str) -> int:
    try:
        number = int(word)
    except ValueError as error:
        raise ConfigError(f"{name}: {word[:80]!r} is not a whole number") from error
    if abs(number) >= MOST:
        raise ConfigError(f"{name}: no chunk, sample or token has the number {number}")
    return number


def shown(result: Any) -> str:
    """A result as text: JSON, a text as it is, but for characters that steer a terminal."""
    if isinstance(result, str):
        return printable(result)
    return printable(json.dumps(result, default=_plain, ensure_ascii=False))


def _plain(value: Any) -> Any:
    assert isinstance(value, np.ndarray), type(value)
    return value.tolist()
