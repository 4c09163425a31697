"""The access log: a JSON object for each request. It has no text of a prompt or an output unless
--log-prompts is given."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from typing import Any

log = logging.getLogger("trainyard.serving.access")

_NOTES: ContextVar[dict[str, Any] | None] = ContextVar("notes", default=None)


def begin() -> dict[str, Any]:
    """Begin the notes of a request."""
    notes: dict[str, Any] = {}
    _NOTES.set(notes)
    return notes


def note(**facts: Any) -> None:
    """Add facts to the line of the request that is being answered."""
    notes = _NOTES.get()
    if notes is not None:
        notes.update(facts)


def write(notes: dict[str, Any]) -> None:
    """Write the line; ASCII, so that no text steers a terminal."""
    log.info("%s", json.dumps(notes, default=str))
