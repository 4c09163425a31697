"""Checks that the options of all backends share; each raises ConfigError naming the option."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from trainyard.errors import ConfigError


def check_pattern(what: str, value: str | None, pattern: re.Pattern[str]) -> None:
    """what: the option, such as `Slurm option partition`."""
    if value is not None and not pattern.fullmatch(value):
        raise ConfigError(f"{what}: {value!r} is not valid: it must match {pattern.pattern}")


def check_choice(what: str, value: str, choices: Iterable[str]) -> None:
    """Empty choices are not listed."""
    choices = tuple(choices)
    if value not in choices:
        raise ConfigError(f"{what}: {value!r} is not one of {', '.join(filter(None, choices))}")


def check_not_negative(kind: str, options: Any, names: Iterable[str]) -> None:
    """kind: such as `Slurm`; None counts as 0."""
    for name in names:
        value = getattr(options, name)
        if (value or 0) < 0:
            raise ConfigError(f"{kind} option {name} must not be negative, got {value}")
