"""What happened to a submission, and when: events.jsonl in its run folder, a line an event.

    {"event": "started", "time": 1795282123.481, "attempt": "20261121-174549-3f2a9c", "job": "17"}

    submitted    a block asked its place for the job
    queued       the place has not given what the job needs, or took it back
    started      the job holds what it asked for
    reattached   another program follows the job that is there
    ended        it holds nothing any more; `kind` says how (flows/backends/outcome.py)

The same event twice running is noted once, and nothing changes a job that has ended, so a block may
note what it sees at each look. What follows from the events: flows/goodput/account.py."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

FILE = "events.jsonl"

Name = Literal["submitted", "queued", "started", "reattached", "ended"]
NAMES: tuple[str, ...] = get_args(Name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line."""

    event: str
    """One of NAMES."""
    time: float
    """Seconds since 1970, by the clock of the program that noted it or of the place."""
    attempt: str
    """The submission: name of its run folder."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is known: `job`, the number in a queue; `kind`, how it ended."""


def note(run_directory: str | Path, event: Name, *, at: float | None = None, **facts: Any) -> bool:
    """Append an event; False, and nothing written, when it is no news.

    at: when it happened, where the place knows better; None: now. facts: JSON-able."""
    if event not in NAMES:
        raise ValueError(f"event {event!r} is none of {', '.join(NAMES)}")
    folder = Path(run_directory)
    if event != "reattached" and _last_state(read_events(folder)) in (event, "ended"):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    moment = round(time.time() if at is None else at, 3)
    line = json.dumps({"event": event, "time": moment, "attempt": folder.name, **facts}) + "\n"
    descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())  # in one piece: two programs may note
    finally:
        os.close(descriptor)
    return True


def _last_state(events: list[Event]) -> str:
    """What the job is in, whoever follows it; empty before the first event."""
    states = [event.event for event in events if event.event != "reattached"]
    return states[-1] if states else ""


def read_events(run_directory: str | Path) -> list[Event]:
    """The events in the order in which they were noted; a line cut short by a full disk is left
    out."""
    try:
        lines = Path(run_directory, FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := _parse(line)) is not None]


def _parse(line: str) -> Event | None:
    try:
        found = json.loads(line)
        name, moment, attempt = found.pop("event"), float(found.pop("time")), found.pop("attempt")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Event(event=name, time=moment, attempt=attempt, facts=found) if name in NAMES else None
