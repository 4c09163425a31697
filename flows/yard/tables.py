"""Tables of a document to frozen dataclasses that hold lists of tables, and maps, as well.

trainyard.config reads the flat documents of stages; profiles of yards are deeper. Wrong types and
unknown keys are refused by the place where they were written."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from trainyard.errors import ConfigError

VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*)(:-(?P<default>[^}]*))?\}")

WORDS: dict[Any, str] = {
    str: "text in quotes",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """ConfigError for a key that there is not, with the nearest one that there is."""
    known = list(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def build(cls: type[Any], table: Any, where: str) -> Any:
    """The dataclass that a table describes; ConfigError also for a rule of the class."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, got {table!r}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    refuse_unknown(table, fields, where)
    for name, field in fields.items():
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if name not in table and not has_default:
            raise ConfigError(f"{where}: {name} is required and was not given")
    values = {key: convert(value, hints[key], f"{where}: {key}") for key, value in table.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def convert(value: Any, annotation: Any, where: str) -> Any:
    """A value of a document as the type that is wanted; Any takes what is there."""
    if annotation is Any:
        return value
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [arg for arg in args if arg is not types.NoneType]
        return None if value is None else convert(value, inner, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} is {value!r}; choose one of {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, got {value!r}")
        return tuple(convert(item, args[0], where) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a table, got {value!r}")
        return {key: convert(item, args[1], f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(annotation):
        return build(typing.cast(type[Any], annotation), value, where)
    return _scalar(value, annotation, where)


def _scalar(value: Any, annotation: Any, where: str) -> Any:
    if annotation is float and type(value) is int:
        return float(value)
    if type(value) is not annotation:
        raise ConfigError(f"{where} must be {WORDS.get(annotation, annotation)}, got {value!r}")
    return value


def filled_in(value: Any, variables: Mapping[str, str], where: str) -> Any:
    """A document whose texts may hold `${NAME}` or `${NAME:-default}`, with these filled in."""
    if isinstance(value, str):
        return VARIABLE.sub(lambda found: _variable(found, variables, where), value)
    if isinstance(value, list):
        return [filled_in(item, variables, where) for item in value]
    if isinstance(value, Mapping):
        return {k: filled_in(item, variables, f"{where}: {k}") for k, item in value.items()}
    return value


def _variable(found: re.Match[str], variables: Mapping[str, str], where: str) -> str:
    name, default = found["name"], found["default"]
    value = variables.get(name) or default
    if value is None:
        raise ConfigError(
            f"{where}: the variable {name} is not set; set it where flows run, or write "
            f"${{{name}:-DEFAULT}}"
        )
    return value
