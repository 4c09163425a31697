"""Where the time of a training went, over all its attempts: pure arithmetic.

A run records when a submission waited and when resources were allocated to it
(flows/backends/events.py). The training records what each attempt spent between one save and the
next; one submission may make several attempts (trainyard/training/logging/attempts.py). Together
they cover every moment once.
Times are whole milliseconds since 1970, and the parts of a span sum to it even when two clocks
disagree.

    queue       waiting for the resources asked for
    start       allocated, training not yet running: images, imports, data, building
    restore     loading the step to resume from
    compile     what the first step of an attempt took longer than the next ones
    data_wait   a step waiting for its batch
    step        steps that were kept
    evaluation  validation and test loss
    checkpoint  training waiting for a save
    lost        steps that no save kept and a later attempt repeated, with all their other times
    idle        allocated, and none of the above
    between     neither allocated nor queued"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

IN_LOOP = ("compile", "data_wait", "checkpoint", "evaluation", "step")
"""Kinds that an attempt records from save to save."""
KINDS = (
    *("queue", "start", "restore", "compile", "data_wait", "step", "evaluation", "checkpoint"),
    *("lost", "idle", "between"),
)
UNALLOCATED = ("queue", "between")
"""Kinds in which no resources were allocated."""

KEPT = ("finished", "stopped", "paused")
"""Outcomes of attempts that saved their last step."""

SLACK_MS = 5000
"""How far the clock of a node may be from that of the program that submitted."""

Span = tuple[int, int]
"""From and until."""
Spent = dict[str, int]
"""Milliseconds of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """When a submission waited, and when resources were allocated to it."""

    attempt: str
    """Name of its run folder."""
    waits: tuple[Span, ...] = ()
    holds: tuple[Span, ...] = ()
    kind: str = ""
    """How it ended (flows/backends/outcome.py); empty: its end was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What an attempt spent from the previous mark until a step was saved."""

    step: int
    time: int
    spent: Mapping[str, int]
    """Of kinds IN_LOOP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What an attempt at training recorded."""

    began: int
    ranks: int = 1
    restore: int = 0
    from_step: int | None = None
    """None if it ended before it knew."""
    loop_began: int | None = None
    marks: tuple[Mark, ...] = ()
    ended: int | None = None
    outcome: str = ""

    @property
    def last_known(self) -> int:
        """The last moment that the attempt recorded."""
        marked = (mark.time for mark in self.marks)
        return max(self.began, self.loop_began or 0, self.ended or 0, *marked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A span in which resources were allocated to one submission."""

    attempt: str
    begin: int
    end: int
    spent: Spent
    ranks: int | None = None
    from_step: int | None = None
    last_step: int | None = None
    """The last that it saved."""
    ended: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The whole time of a run, by kind and by row."""

    begin: int
    end: int
    spent: Spent
    rows: tuple[Row, ...]

    @property
    def allocated(self) -> int:
        """Milliseconds in which resources were allocated."""
        return sum(allocated(self.spent).values())

    @property
    def goodput(self) -> float | None:
        """The share of the allocated time that went into steps that were kept."""
        return self.spent["step"] / self.allocated if self.allocated else None

    @property
    def device_seconds(self) -> float:
        """Allocated time, times the ranks of each attempt that recorded them."""
        return sum((row.end - row.begin) * (row.ranks or 0) for row in self.rows) / 1000


# --- the account: pure arithmetic ---------------------------------------------------------------


def account(submissions: Sequence[Submission], attempts: Sequence[Attempt]) -> Account:
    """Divide the time of a run into kinds and submissions.

    A moment in which two submissions had resources counts once, for the earlier one. An attempt
    outside all submissions was started by hand: it counts as allocated from its beginning to its
    last record."""
    attempts = sorted(attempts, key=lambda attempt: attempt.began)
    holds = [(span, of) for of in submissions for span in of.holds if span[0] < span[1]]
    by_hand = [a for a in attempts if all(_distance(a, span) > SLACK_MS for span, _ in holds)]
    holds += [((a.began, a.last_known), Submission(attempt="by hand")) for a in by_hand]
    places: list[tuple[Span, Submission]] = []
    free = 0
    for (begin, end), of in sorted(holds, key=lambda hold: hold[0]):
        if end > max(begin, free) or begin >= free:
            places.append(((max(begin, free), end), of))
            free = max(free, end)

    within: list[list[tuple[Attempt, int | None]]] = [[] for _ in places]
    for i, attempt in enumerate(attempts):
        begun_again = [a.from_step for a in attempts[i + 1 :] if a.from_step is not None]
        distances = [_distance(attempt, span) for span, _ in places]
        nearest = max(n for n, far in enumerate(distances) if far == min(distances))
        within[nearest].append((attempt, min(begun_again, default=None)))
    rows = [_row(span, of, ours) for (span, of), ours in zip(places, within, strict=True)]

    allocated = [span for span, _ in places]
    waits = [span for s in submissions for span in s.waits if span[0] < span[1]]
    spent = {kind: sum(row.spent[kind] for row in rows) for kind in KINDS}
    spent["queue"] = _covered([*allocated, *waits]) - _covered(allocated)
    begin = min((begin for begin, _ in (*allocated, *waits)), default=0)
    end = max((end for _, end in (*allocated, *waits)), default=0)
    spent["between"] = end - begin - sum(spent.values())
    return Account(begin=begin, end=end, spent=spent, rows=tuple(rows))


def _distance(attempt: Attempt, span: Span) -> int:
    """How far outside a span an attempt began."""
    return max(span[0] - attempt.began, attempt.began - span[1], 0)


def _covered(spans: Iterable[Span]) -> int:
    """Milliseconds in at least one of the spans."""
    covered = free = 0
    for begin, end in sorted(spans):
        covered += max(end - max(begin, free), 0)
        free = max(free, end)
    return covered


def _row(span: Span, of: Submission, attempts: Sequence[tuple[Attempt, int | None]]) -> Row:
    """attempts: those within the span, each with the step from which later ones began again."""
    begin, end = span
    spent = dict.fromkeys(KINDS, 0)
    if not attempts:
        spent["start"] = end - begin
        return Row(attempt=of.attempt, begin=begin, end=end, spent=spent, ended=of.kind)
    cuts = [begin, *(_clamp(attempt.began, begin, end) for attempt, _ in attempts[1:]), end]
    for (attempt, kept), part in zip(attempts, pairwise(cuts), strict=True):
        _add_attempt(spent, attempt, part, kept)
    last = attempts[-1][0]
    return Row(
        attempt=of.attempt,
        begin=begin,
        end=end,
        spent=spent,
        ranks=last.ranks,
        from_step=attempts[0][0].from_step,
        last_step=max((mark.step for one, _ in attempts for mark in one.marks), default=None),
        ended=of.kind or last.outcome,
    )


def _add_attempt(spent: Spent, attempt: Attempt, span: Span, kept: int | None) -> None:
    """Add the span of an attempt, kind by kind; the parts sum to the span."""
    begin, end = span
    at = end if attempt.loop_began is None else _clamp(attempt.loop_began, begin, end)
    restore = _clamp(attempt.restore, 0, at - begin)
    spent["restore"] += restore
    spent["start"] += at - begin - restore
    for mark in attempt.marks:
        until = _clamp(mark.time, at, end)
        left, is_lost = until - at, kept is not None and mark.step > kept
        for kind in IN_LOOP:
            amount = _clamp(mark.spent.get(kind, 0), 0, left)
            spent["lost" if is_lost and kind != "compile" else kind] += amount
            left -= amount
        spent["lost" if is_lost else "idle"] += left
        at = until
    if attempt.outcome not in KEPT:
        stopped = end if attempt.ended is None else _clamp(attempt.ended, at, end)
        spent["lost"] += stopped - at
        at = stopped
    spent["idle"] += end - at


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def allocated(spent: Mapping[str, int]) -> Spent:
    """The kinds in which resources were allocated."""
    return {kind: amount for kind, amount in spent.items() if kind not in UNALLOCATED}


def percentages(amounts: Mapping[str, int], digits: int = 1) -> dict[str, float]:
    """Of the sum, rounded so that the rounded ones sum to 100; all 0 if the sum is."""
    whole = sum(amounts.values())
    if whole == 0:
        return dict.fromkeys(amounts, 0.0)
    unit = 10**digits
    floors = {name: amount * 100 * unit // whole for name, amount in amounts.items()}
    missing = 100 * unit - sum(floors.values())
    rests = sorted(amounts, key=lambda name: -(amounts[name] * 100 * unit % whole))
    return {name: (floors[name] + (name in rests[:missing])) / unit for name in amounts}
