"""The policy: how long everything is kept; and the record of one piece of garbage."""

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
    """Ages count from the last write, by the clock of the store."""

    keep_corpus_versions: int = 3
    """Number of newest versions of a corpus that are always kept."""
    corpus_days: float = 7.0
    """How long a superseded version is kept; longer if something in use refers to it."""
    claim_hours: float = 1.0
    """A claim that was not renewed for this long is stale; holders renew every five seconds."""
    upload_hours: float = 24.0
    """How long incomplete uploads and temporary files are kept."""
    attempt_days: float = 14.0
    """How long unfinished work and incomplete outputs are kept, from which a rerun resumes."""
    keep_runs: int = 10
    """Number of newest run folders of each job (config, script, log) that are always kept."""
    run_days: float = 30.0
    """How long all other run folders are kept."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 1 if field.name == KEPT else 0
            if value < least:
                flag = "--" + field.name.replace("_", "-")
                raise ConfigError(f"{flag} must be at least {least}, got {value}")


STANDARD = Policy()
"""The default policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """One thing that can be removed, and how."""

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
