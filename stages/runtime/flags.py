"""Reads the flags of a stage, which are the fields of its configuration.

One error line for everything that a command line can get wrong. Knows the types of fields and no
stage; --help is tyro's (stages.runtime.cli)."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, Literal

from trainyard.config import MISSING, convert, flag, leaves, other_names
from trainyard.errors import ConfigError
from trainyard.megatron_cli.options import Option, flag_hint, split_options


def read_flags(arguments: Sequence[str], *classes: type) -> dict[str, Any]:
    """The given values by field name; of a flag given twice, the last value counts.

    Raises ConfigError for a flag that no class has, with the nearest one, and for a value of the
    wrong type."""
    first, options = split_options(arguments)
    fields = {name: annotation for cls in classes for name, annotation, _ in leaves(cls)}
    others = {other: name for cls in classes for other, name in other_names(cls).items()}
    if first:
        raise ConfigError(_stray(first[0], fields))
    given: dict[str, Any] = {}
    for option in options:
        name = option.name.replace("-", "_")
        name = others.get(name, name)
        negated = name.removeprefix("no_")
        if name in fields:
            given[name] = _value(option, fields[name], fields)
        elif negated != name and fields.get(negated) in (bool, bool | None):
            given[negated] = not _value(option, bool, fields)
        else:
            hint = flag_hint(name.replace("_", "-"), [flag(known)[2:] for known in fields])
            raise ConfigError(f"{option.given} is not an option: {hint}")
    return given


def check_required(config: Any) -> None:
    """Raise ConfigError that names every required option which a partial configuration lacks."""
    if needed := [flag(name) for name in _missing(config)]:
        are = "are" if len(needed) > 1 else "is"
        raise ConfigError(
            f"{', '.join(needed)} {are} required and not given: add flags, or keys of a --config; "
            "--help explains every option"
        )


def _missing(config: Any) -> Iterator[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if value is MISSING:
            yield field.name
        elif dataclasses.is_dataclass(value):
            yield from _missing(value)


def _value(option: Option, annotation: Any, fields: typing.Collection[str]) -> Any:
    """The value of a flag in the type of its field."""
    arguments = typing.get_args(annotation)
    if NoneType in arguments:
        if option.values == ["None"]:
            return None
        (annotation,) = [argument for argument in arguments if argument is not NoneType]
        return _value(option, annotation, fields)
    for value in option.values:
        if value.startswith("-") and value[1:].replace("-", "_") in fields:
            raise ConfigError(_stray(value, fields))
    if annotation is bool:
        if option.values:
            name = option.name.removeprefix("no-")
            raise ConfigError(
                f"{option.given} takes no value, got {' '.join(option.values)!r}: --{name} turns "
                f"it on, --no-{name} off"
            )
        return True
    if typing.get_origin(annotation) is tuple:
        return tuple(_scalar(option, value, arguments[0]) for value in option.values)
    if len(option.values) != 1:
        got = " ".join(option.values) or "none"
        raise ConfigError(f"{option.given} takes one value, got {got}")
    return _scalar(option, option.values[0], annotation)


def _scalar(option: Option, text: str, annotation: Any) -> Any:
    """A word as a string, number or choice."""
    value: Any = text
    kinds = {type(choice) for choice in typing.get_args(annotation)} or {annotation}
    is_choice = typing.get_origin(annotation) is Literal
    if int in kinds:
        value = _whole_number(text)
    elif annotation is float:
        value = _number(text)
    if not is_choice and isinstance(value, str) and annotation is not str:
        kind = "a whole number" if annotation is int else "a number"
        raise ConfigError(f"{option.given} must be {kind}, got {text!r}{_digits(text, annotation)}")
    return convert(value, annotation, option.given)


def _whole_number(text: str) -> int | str:
    digits = text.removeprefix("-").removeprefix("+")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 1000 else text


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _digits(text: str, annotation: Any) -> str:
    """The hint for a whole number in another spelling, such as 1e9."""
    number = _number(text.replace(",", ""))
    if annotation is not int or isinstance(number, str) or not abs(number) < 1e18:
        return ""
    return f": write {int(number)}" if number == int(number) else ""


def _stray(word: str, fields: typing.Collection[str]) -> str:
    hint = flag_hint(word.lstrip("-").replace("_", "-"), [flag(name)[2:] for name in fields])
    return f"{word!r} is neither an option nor the value of one: {hint}"
