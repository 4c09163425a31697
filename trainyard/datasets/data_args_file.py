"""Reads lists of data from files: --data-args-path and --per-split-data-args-path.

A list of a thousand prefixes does not fit a command line. The file is read when the inputs of a
stage are listed, and again when its data is built. Only its contents count, so a list in a file and
the same list as options give the same run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trainyard.artifacts import store
from trainyard.errors import ConfigError


def read_list(url: str, where: str) -> tuple[str, ...]:
    """The values of --data-path in a file, separated by any white space."""
    paths = tuple(_text(url, where).split())
    if not paths:
        raise ConfigError(f"{where} is empty; list the values of --data-path in it")
    return paths


def read_lists(url: str, where: str, splits: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The values of --train-data-path, --valid-data-path and --test-data-path in a file."""
    try:
        document = json.loads(_text(url, where))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not a JSON document: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f'{where} must be a JSON object, {{"train": [...], "valid": [...]}}')
    for key in document:
        if key not in splits:
            raise ConfigError(f"{where}: unknown key {key!r}; known are {', '.join(splits)}")
    return {key: _words(value, f"{where}: {key!r}") for key, value in document.items()}


def _words(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list of prefixes, or of weights and prefixes")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ConfigError(f"{where} contains {item!r}, which is neither a weight nor a prefix")
    return tuple(str(item).strip() for item in value)


def _text(url: str, where: str) -> str:
    if not store.exists(url):
        raise ConfigError(f"{where}: the file does not exist")
    try:
        return store.read_bytes(url).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text: {error}") from error
