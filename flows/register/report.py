"""The report of a registration, one line for each item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """The lines of a registration, and the number of changes."""

    is_dry: bool
    lines: list[str] = field(default_factory=list)
    num_changes: int = 0

    def created(self, what: str) -> None:
        """Report an item that the server did not have."""
        self._record("created", what)

    def changed(self, what: str, keys: list[str]) -> None:
        """Report an item that the server had with other values of these keys."""
        self._record("changed", f"{what}: {', '.join(keys)}")

    def unchanged(self, what: str) -> None:
        """Report an item that the server had as desired."""
        self.lines.append(f"unchanged       {what}")

    def kept(self, what: str) -> None:
        """Report a setting that a person changed on the server, which registration keeps."""
        self.lines.append(f"{'kept':<15} {what}")

    def left_over(self, what: str, removal: str) -> None:
        """Report an item of this yard that is no longer written; removal: the command for that."""
        self.lines.append(f"{'left over':<15} {what} (no longer written; {removal})")

    def _record(self, done: str, what: str) -> None:
        self.num_changes += 1
        verb = {"created": "would create", "changed": "would change"}[done] if self.is_dry else done
        self.lines.append(f"{verb:<15} {what}")


def differing(there: Mapping[str, Any], desired: Mapping[str, Any]) -> list[str]:
    """Keys whose value on the server differs from the desired one."""
    return [key for key, value in desired.items() if there.get(key) != value]
