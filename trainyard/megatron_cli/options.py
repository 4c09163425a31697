"""Splits a command line into flags and their values. Knows no names of options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.config import nearest
from trainyard.errors import ConfigError


@dataclass(slots=True)
class Option:
    """A flag and the values after it."""

    given: str
    """The flag as it was typed, with its dashes."""
    name: str
    """The flag without leading dashes, with hyphens for underscores."""
    values: list[str]

    @property
    def value(self) -> str:
        """Its one value."""
        if len(self.values) != 1:
            raise ConfigError(
                f"{self.given} takes one value, got {' '.join(self.values) or 'none'}"
            )
        return self.values[0]

    @property
    def number(self) -> int:
        """Its one value, a number above 0."""
        if not self.value.isdigit() or int(self.value) < 1:
            raise ConfigError(f"{self.given} must be a whole number above 0, got {self.value!r}")
        return int(self.value)

    def tokens(self) -> list[str]:
        """The option as arguments of our command."""
        return ["--" + self.name, *self.values]


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[Option]]:
    """The arguments before the first flag, and the flags with their values."""
    first: list[str] = []
    options: list[Option] = []
    for token in arguments:
        if token.startswith("--") and len(token) > 2:
            given, equals, value = token.partition("=")
            name = given[2:].replace("_", "-")
            options.append(Option(given, name, [value] if equals else []))
        elif token == "-h":
            options.append(Option(token, "help", []))
        elif options:
            options[-1].values.append(token)
        else:
            first.append(token)
    return first, options


def flag_hint(name: str, known: Sequence[str]) -> str:
    """A hint for an unknown flag, with up to three known ones. Names are without leading dashes."""
    near = [name] if name in known else nearest(name, dict.fromkeys(known), most=3)
    if not near:
        return "--help lists all options"
    return f"did you mean {' or '.join('--' + n for n in near)}?"


def unquoted(value: str) -> str:
    """A value without one pair of quotes around it, which scripts leave there by quoting twice:
    "'99,1,0'"."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value


def is_number(text: str) -> bool:
    """Whether Python reads it as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
