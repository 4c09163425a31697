"""What happened to a submission, and when: events.jsonl in its run folder, a line an event.

    {"event": "started", "time": 1795282123.481, "attempt": "20261121-174549-3f2a9c", "job": "17"}

    submitted    the job was submitted to its backend
    queued       it waits for its resources, or lost them again
    started      its resources were allocated
    reattached   another program follows the same job
    ended        it released them; `kind` is how it ended (flows/backends/outcome.py)

The same event twice in a row is recorded once, and nothing follows `ended`, so a backend may record
the state at each poll. flows/goodput/account.py computes times from the events."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from trainyard import json_text

FILE = "events.jsonl"

Name = Literal["submitted", "queued", "started", "reattached", "ended"]
NAMES: tuple[str, ...] = get_args(Name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line."""

    event: str
    """One of NAMES."""
    time: float
    """Seconds since 1970, by the clock of the recording program or of the backend."""
    attempt: str
    """The submission: name of its run folder."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is known: `job`, its name or id; `kind`, how it ended."""


def record_event(
    run_directory: str | Path, event: Name, *, at: float | None = None, **facts: Any
) -> bool:
    """Append an event; False, and nothing written, if the job is in that state already.

    at: when it happened, if the backend reports that; None: now. facts: JSON-able."""
    if event not in NAMES:
        raise ValueError(f"event {event!r} is not one of {', '.join(NAMES)}")
    folder = Path(run_directory)
    states = [one.event for one in read_events(folder) if one.event != "reattached"]
    if event != "reattached" and states and states[-1] in (event, "ended"):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    moment = round(time.time() if at is None else at, 3)
    line = json.dumps({"event": event, "time": moment, "attempt": folder.name, **facts}) + "\n"
    descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())  # in one piece: two programs may append
    finally:
        os.close(descriptor)
    return True


def read_events(run_directory: str | Path) -> list[Event]:
    """The events in the order of recording, without lines cut short by a full disk."""
    try:
        lines = Path(run_directory, FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := _parse(line)) is not None]


def _parse(line: str) -> Event | None:
    try:
        found = json_text.loads(line)
        name, moment, attempt = found.pop("event"), float(found.pop("time")), found.pop("attempt")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Event(event=name, time=moment, attempt=attempt, facts=found) if name in NAMES else None
