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
    """The rule with its parameters; ConfigError for a language or script that does not exist."""
    function = getattr(MODULES[RULES[spec.name]], spec.name)
    known = inspect.signature(function).parameters
    given = dict(spec.arguments)
    if "keep" in known:
        check = script.check_scripts if spec.name == "script" else language.check_languages
        check(given.get("keep", known["keep"].default))
    return Rule(spec.written, partial(function, **given) if given else function)
