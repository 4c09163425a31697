"""What a registration found and did, one line for each thing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """Grows while a yard is registered."""

    is_dry: bool
    lines: list[str] = field(default_factory=list)
    num_changes: int = 0

    def created(self, what: str) -> None:
        """It was not there."""
        self._say("created", what)

    def changed(self, what: str, keys: list[str]) -> None:
        """It was there, otherwise."""
        self._say("changed", f"{what}: {', '.join(keys)}")

    def unchanged(self, what: str) -> None:
        """It was there, as desired."""
        self.lines.append(f"unchanged       {what}")

    def kept(self, what: str) -> None:
        """A person has it otherwise than the profile, and may."""
        self.lines.append(f"{'kept':<15} {what}")

    def left_over(self, what: str, removal: str) -> None:
        """It is of this yard, and nothing wants it any more; the command would remove it."""
        self.lines.append(f"{'left over':<15} {what} (no longer written; {removal})")

    def _say(self, done: str, what: str) -> None:
        self.num_changes += 1
        verb = {"created": "would create", "changed": "would change"}[done] if self.is_dry else done
        self.lines.append(f"{verb:<15} {what}")


def differing(there: Mapping[str, Any], desired: Mapping[str, Any]) -> list[str]:
    """Keys whose value on the server is not the one desired."""
    return [key for key, value in desired.items() if there.get(key) != value]
