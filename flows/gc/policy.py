"""How long what is kept; and what was found to be of no use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from trainyard.errors import ConfigError

HOUR = 3600.0
DAY = 24 * HOUR


KEPT = "keep_corpus_versions"
"""The newest one is always kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Ages count from when something was last written, by the clock of its store."""

    keep_corpus_versions: int = 3
    """The newest versions of a corpus that corpus-refresh keeps up, in use or not."""
    corpus_days: float = 7.0
    """A version is removed when it was superseded so long ago, and nothing in use refers to it."""
    claim_hours: float = 1.0
    """A claim is renewed every five seconds; one that stood still for so long has no holder."""
    upload_hours: float = 24.0
    """Parts of an upload, and temporary files, that nobody completed."""
    attempt_days: float = 14.0
    """Unfinished work of a stage, and outputs that were begun: after a kill it goes on from there
    for so long."""
    keep_runs: int = 10
    """The newest run folders of each job: config, script, log."""
    run_days: float = 30.0
    """Run folders besides those."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 1 if field.name == KEPT else 0
            if value < least:
                flag = "--" + field.name.replace("_", "-")
                raise ConfigError(f"{flag} must be at least {least}, got {value}")


STANDARD = Policy()
"""What holds where nobody says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """One thing that is of no use, and how it is removed."""

    kind: str
    url: str
    size_bytes: int
    why: str
    remove: Callable[[], object]

    def to_document(self) -> dict[str, Any]:
        """JSON-able."""
        return {"kind": self.kind, "url": self.url, "size_bytes": self.size_bytes, "why": self.why}


def age(seconds: float) -> str:
    """An age, for people."""
    if seconds >= 2 * DAY:
        return f"{seconds / DAY:.0f} days"
    return f"{seconds / HOUR:.0f} hours" if seconds >= 2 * HOUR else f"{seconds:.0f} seconds"
