"""The rules by name, their spelling on a command line, and the presets.

A rule is written NAME or NAME:KEY=VALUE,KEY=VALUE; keys are the parameters of its function, whose
defaults are the published limits. Standard library only, so that options and recipes are
checked anywhere; `build` has the functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.config import nearest
from trainyard.errors import ConfigError

RULES = {
    **dict.fromkeys(("fix_text", "nfc", "nfkc", "general_cleaning", "blank_lines"), "form"),
    **dict.fromkeys(("min_chars", "max_chars", "min_words", "min_tokens"), "form"),
    "javascript_notice": "form",
    **dict.fromkeys(("language", "short_foreign"), "language"),
    "script": "script",
    **dict.fromkeys(("gopher_quality", "gopher_repetition"), "gopher"),
    **dict.fromkeys(("c4", "citations", "fineweb"), "web"),
    **dict.fromkeys(("mask_emails", "mask_ips", "mask_phones"), "pii"),
}
"""The module of each rule's function."""

PARAMETERS: dict[str, dict[str, type]] = {
    "blank_lines": {"most": int},
    "min_chars": {"limit": int},
    "max_chars": {"limit": int},
    "min_words": {"limit": int},
    "javascript_notice": {"limit": int},
    "min_tokens": {"limit": int, "below_chars": int},
    "language": {"keep": str, "min": float, "chars": int},
    "script": {"keep": str, "min": float, "chars": int},
    "short_foreign": {"keep": str, "limit": int},
    "gopher_quality": {
        **dict.fromkeys(("min_words", "max_words", "min_stop_words"), int),
        **dict.fromkeys(("min_mean_length", "max_mean_length", "min_alphabetic"), float),
        **dict.fromkeys(("max_symbols", "max_bullets", "max_ellipses"), float),
    },
    "gopher_repetition": dict.fromkeys(("max_lines", "max_chars", "scale"), float),
    "c4": {"min_sentences": int, "min_words": int, "max_word_length": int, "end_marks": bool},
    "fineweb": {
        **dict.fromkeys(("min_terminal", "max_short", "max_repeated", "max_breaks"), float),
        "short": int,
    },
}
"""The parameters of the functions, for those who only check a rule; a rule that is not here has
none."""

BELOW_1 = {("language", "min"), ("script", "min")}
"""Parameters that are shares."""

COUNTS_TOKENS = "min_tokens"

PRESETS: dict[str, tuple[str, ...]] = {
    "openwebtext": (
        *("fix_text", "language:min=0,chars=100000", "min_tokens"),
        *("min_chars", "javascript_notice", "short_foreign", "fix_text"),
    ),
    "wikipedia": ("fix_text", "citations", "blank_lines", "min_words:limit=25"),
    "c4": ("language:min=0.99", "c4"),
    "fineweb": (
        *("language", "gopher_repetition", "gopher_quality"),
        *("c4:end_marks=false,min_sentences=5,min_words=3", "fineweb"),
    ),
    "none": (),
}
"""openwebtext: Megatron-LM's cleanup_dataset.py, then cleanup_fix_dataset.py with the tasks of its
guide, in their order. c4, fineweb: their papers. wikipedia: for text that stages.collect extracted.
none: the rules of --rules alone."""


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """A rule as written: checked, not built."""

    written: str
    name: str
    arguments: tuple[tuple[str, Any], ...]
    """Parameters that are given, with values of their types."""


def parse_rule(written: str) -> RuleSpec:
    """Read NAME:KEY=VALUE,...; ConfigError for an unknown name or key, and for a value of another
    type."""
    name, colon, rest = written.partition(":")
    if name not in RULES:
        close = nearest(name, RULES)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"--rules {written}: no rule {name!r}; {hint}the rules are {' '.join(RULES)}"
        )
    arguments = []
    for part in rest.split(",") if colon else ():
        key, sign, value = part.partition("=")
        if not (key and sign and value):
            raise ConfigError(
                f"--rules {written}: {part!r} is not KEY=VALUE; write {name}:KEY=VALUE,KEY=VALUE"
            )
        arguments.append((key, _value(f"--rules {written}", name, key, value)))
    return RuleSpec(written, name, tuple(arguments))


def _value(where: str, name: str, key: str, text: str) -> Any:
    known = PARAMETERS.get(name, {})
    if key not in known:
        close = nearest(key, known)
        raise ConfigError(
            f"{where}: {name} has no {key!r}, only {' '.join(known) or 'no parameter at all'}"
            if not close
            else f"{where}: {name} has no {key!r}; did you mean {close[0]!r}?"
        )
    kind = known[key]
    if kind is bool:
        if text in ("true", "false"):
            return text == "true"
        raise ConfigError(f"{where}: {key} is true or false, not {text!r}")
    if kind is str:
        return text
    try:
        number = kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{where}: {key} is {wanted}, not {text!r}") from None
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{where}: {key} must not be negative or infinite")
    if (name, key) in BELOW_1 and number > 1:
        raise ConfigError(f"{where}: {key} is at most 1, and not {number:g}")
    return number


def named(rules: Sequence[RuleSpec]) -> list[str]:
    """The names of rules in reports: as written, and numbered where one is written again."""
    seen: dict[str, int] = {}
    names = []
    for rule in rules:
        seen[rule.written] = seen.get(rule.written, 0) + 1
        again = seen[rule.written]
        names.append(rule.written if again == 1 else f"{rule.written} #{again}")
    return names
