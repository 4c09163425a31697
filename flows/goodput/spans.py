"""What blocks and trainings told of a run's time, as numbers: whole milliseconds since 1970."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.backends.events import Event

IN_LOOP = ("compile", "data_wait", "checkpoint", "evaluation", "step")
"""What an attempt tells of from save to save."""

Span = tuple[int, int]
"""From and until."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """When a submission waited and when it held what it had asked for."""

    attempt: str
    waits: tuple[Span, ...] = ()
    holds: tuple[Span, ...] = ()
    kind: str = ""
    """How it ended, in the words of flows/backends/outcome.py; empty: nobody was left to say."""

    @property
    def span(self) -> Span:
        """From its first moment to its last."""
        spans = self.waits + self.holds
        return min(begin for begin, _ in spans), max(end for _, end in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What an attempt spent from the mark before, in milliseconds, until a step was saved."""

    step: int
    time: int
    spent: Mapping[str, int]
    """Of kinds IN_LOOP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What an attempt at training said of itself."""

    began: int
    ranks: int = 1
    restore: int = 0
    from_step: int | None = None
    """None where it did not come so far."""
    loop_began: int | None = None
    marks: tuple[Mark, ...] = ()
    ended: int | None = None
    outcome: str = ""

    @property
    def last_known(self) -> int:
        """The last moment that it told of."""
        return max(
            self.began, self.loop_began or 0, self.ended or 0, *(mark.time for mark in self.marks)
        )


# --- what was written, as numbers ---------------------------------------------------------------


def ms(seconds: float) -> int:
    """Whole milliseconds."""
    return round(1000 * seconds)


def submission_of(events: Sequence[Event], last_sign: float) -> Submission | None:
    """The submission that events are of; None without any.

    last_sign: when a job of which nobody noted the end was last heard of, in seconds since 1970."""
    spans: dict[str, list[Span]] = {"queued": [], "started": []}
    state, since, attempt, kind = "", 0, "", ""
    for event in events:
        attempt = event.attempt
        if event.event == "reattached":
            continue
        moment = max(ms(event.time), since)  # clocks of two machines
        if state:
            spans[state].append((since, moment))
        state, since = {"submitted": "queued", "ended": ""}.get(event.event, event.event), moment
        kind = str(event.facts.get("kind", ""))
    if state:
        spans[state].append((since, max(ms(last_sign), since)))
    if not any(spans.values()):
        return None
    return Submission(
        attempt=attempt,
        waits=tuple(_merged(spans["queued"])),
        holds=tuple(_merged(spans["started"])),
        kind=kind,
    )


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Neighbours that touch as one."""
    merged: list[Span] = []
    for begin, end in spans:
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def attempt_of(document: Mapping[str, Any]) -> Attempt:
    """An attempt as training wrote it down."""
    loop, ended = document.get("loop_began"), document.get("ended")
    return Attempt(
        began=ms(document["began"]),
        ranks=int(document.get("ranks", 1)),
        restore=ms(document.get("restore_seconds", 0.0)),
        from_step=document.get("from_step"),
        loop_began=None if loop is None else ms(loop),
        marks=tuple(_mark(mark) for mark in document.get("marks", ())),
        ended=None if ended is None else ms(ended),
        outcome=str(document.get("outcome", "")),
    )


def _mark(document: Mapping[str, Any]) -> Mark:
    named = {"step": "step_seconds"}
    spent = {kind: ms(document.get(named.get(kind, kind), 0.0)) for kind in IN_LOOP}
    return Mark(step=int(document["step"]), time=ms(document["time"]), spent=spent)
