"""argparse for the programs of flows, which answers a mistake in one line, with the nearest name.

Stages read theirs with stages/runtime/flags.py, from the fields of a configuration."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from trainyard.config import nearest
from trainyard.logging import printable

CHOICE = re.compile(r"argument (\S+): invalid choice: '([^']*)' \(choose from ([^)]*)\)")
VALUE = re.compile(r"argument (\S+): invalid (\w+) value: (.*)")
KINDS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """argparse, without the lines of usage before an error."""

    elsewhere = ""
    """Added to the message about an unknown option: where options belong that are none here."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse a misspelt option before argparse looks for what is missing because of it."""
        takes_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        for word in [] if takes_rest else sys.argv[1:] if args is None else args:
            name = word.partition("=")[0]
            known = list(self._option_string_actions)
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                self.error(f"{name} is not an option{_hint(name, known) or self.elsewhere}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line, and exit with 2."""
        if found := CHOICE.fullmatch(message):
            name, given, choices = found.groups()
            known = [choice.strip("' ") for choice in choices.split(",")]
            message = f"{name} {given!r} is not one of {', '.join(known)}{_hint(given, known)}"
        elif found := VALUE.fullmatch(message):
            name, kind, given = found.groups()
            message = f"{name} must be {KINDS.get(kind, kind)}, got {given}"
        print(printable(f"error: {message}; {self.prog} --help explains all"), file=sys.stderr)
        raise SystemExit(2)


def _hint(name: str, known: list[str]) -> str:
    near = nearest(name, known)
    return f": did you mean {near[0]}?" if near else ""
