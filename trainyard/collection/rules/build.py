"""Makes a rule of its spelling: the function with its parameters, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainyard.collection.rules import form, gopher, language, pii, script, web
from trainyard.collection.rules.page import Page, Verdict
from trainyard.collection.rules.table import RULES, RuleSpec
from trainyard.errors import ConfigError

MODULES: dict[str, Any] = {
    "form": form,
    "gopher": gopher,
    "language": language,
    "pii": pii,
    "script": script,
    "web": web,
}
"""The modules that the table of rules names."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule to apply."""

    written: str
    """As in the preset or on the command line; names it in reports."""
    apply: Callable[[Page], Verdict]


def build_rule(spec: RuleSpec) -> Rule:
    """The rule with its parameters; ConfigError for one that it does not have."""
    function = getattr(MODULES[RULES[spec.name]], spec.name)
    known = dict(list(inspect.signature(function).parameters.items())[1:])
    given: dict[str, Any] = {}
    for key, value in spec.arguments:
        if key not in known:
            raise ConfigError(
                f"--rules {spec.written}: {spec.name} has no {key!r}, only "
                f"{' '.join(known) or 'no parameter at all'}"
            )
        given[key] = _converted(spec, key, value, known[key].default)
    if spec.name in ("language", "script") and given.get("min", 0.0) > 1.0:
        raise ConfigError(f"--rules {spec.written}: min is at most 1, and not {given['min']:g}")
    if "keep" in known:
        check = script.check_scripts if spec.name == "script" else language.check_languages
        check(given.get("keep", known["keep"].default))
    return Rule(spec.written, partial(function, **given) if given else function)


def _converted(spec: RuleSpec, key: str, value: str, default: Any) -> Any:
    if isinstance(default, bool):
        if value in ("true", "false"):
            return value == "true"
        raise ConfigError(f"--rules {spec.written}: {key} is true or false, not {value!r}")
    if isinstance(default, str):
        return value
    try:
        number = type(default)(value)
    except ValueError:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise ConfigError(f"--rules {spec.written}: {key} is {kind}, not {value!r}") from None
    if not 0 <= number < float("inf"):
        raise ConfigError(f"--rules {spec.written}: {key} must not be negative or infinite")
    return number
