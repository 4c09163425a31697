"""Where the time of a run went, over all attempts at it: pure arithmetic of two accounts.

Of each submission its block noted when it waited and when it held what it had asked for
(flows/backends/events.py). Of each attempt at training, of which one submission may make several,
the training itself kept what it spent between one save and the next
(trainyard/training/logging/attempts.py). Laid over each other they leave no moment out and count
none twice: times are whole milliseconds, and whatever two clocks that disagree say of a span, its
parts sum to it.

    queue       it waited for what it had asked for
    start       it held that, and training did not run yet: images, imports, data, building
    restore     loading the step that it went on from
    compile     what the first step of an attempt took longer than those after it
    data_wait   a step waited for its batch
    step        steps that were kept: what all the rest is for
    evaluation  the validation and the test loss
    checkpoint  training waited for a save
    lost        steps, and all that came with them, that no save kept and a later attempt did again
    idle        it held everything and did nothing of the above
    between     nothing was held and nothing was asked for"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flows.goodput.spans import IN_LOOP, Attempt, Span, Submission

KINDS = (
    *("queue", "start", "restore", "compile", "data_wait", "step", "evaluation", "checkpoint"),
    *("lost", "idle", "between"),
)
UNALLOCATED = ("queue", "between")
"""Kinds in which nothing was held."""

KEPT = ("finished", "stopped", "paused")
"""Outcomes of attempts that saved what they had done."""

SLACK_MS = 5000
"""So far the clock of a node may be from that of the program that submitted."""

Spent = dict[str, int]
"""Milliseconds of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A stretch in which one submission held what it had asked for."""

    attempt: str
    begin: int
    end: int
    spent: Spent
    ranks: int | None = None
    from_step: int | None = None
    last_step: int | None = None
    """Of its marks."""
    ended: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The whole time of a run, taken apart."""

    begin: int
    end: int
    spent: Spent
    rows: tuple[Row, ...]

    @property
    def allocated(self) -> int:
        """Milliseconds in which anything was held."""
        return sum(ms for kind, ms in self.spent.items() if kind not in UNALLOCATED)

    @property
    def goodput(self) -> float | None:
        """The share of what was held that went into steps that were kept."""
        return self.spent["step"] / self.allocated if self.allocated else None

    @property
    def device_seconds(self) -> float:
        """Held, times the ranks of each attempt, as far as it said how many."""
        held = ((row.end - row.begin) * (row.ranks or 0) for row in self.rows)
        return sum(held) / 1000


# --- the account --------------------------------------------------------------------------------


def account(submissions: Sequence[Submission], attempts: Sequence[Attempt]) -> Account:
    """Take the time of a run apart.

    Where two submissions held something at once the moment counts once, as the earlier one's. An
    attempt that no submission holds, such as one that was made by hand, is held from its beginning
    to the last that it told of."""
    attempts = sorted(attempts, key=lambda attempt: attempt.began)
    holds = [(span, s) for s in submissions for span in s.holds if span[0] < span[1]]
    by_hand = [a for a in attempts if all(_apart(a, span) > SLACK_MS for span, _ in holds)]
    holds += [((a.began, a.last_known), Submission(attempt="by hand")) for a in by_hand]
    held = _one_after_the_other(holds)
    homes = [_home(attempt, [span for span, _ in held]) for attempt in attempts]
    told = list(zip(attempts, _kept_until(attempts), strict=True))
    rows = [
        _row(span, of, [one for one, home in zip(told, homes, strict=True) if home == place])
        for place, (span, of) in enumerate(held)
    ]
    waits = _waits(submissions, [span for span, _ in held])
    begin = min((span[0] for span in (*waits, *(span for span, _ in held))), default=0)
    end = max((span[1] for span in (*waits, *(span for span, _ in held))), default=0)
    spent = dict.fromkeys(KINDS, 0)
    for row in rows:
        for kind, amount in row.spent.items():
            spent[kind] += amount
    spent["queue"] = sum(b - a for a, b in waits)
    spent["between"] = end - begin - sum(spent.values())
    return Account(begin=begin, end=end, spent=spent, rows=tuple(rows))


def _apart(attempt: Attempt, span: Span) -> int:
    """How far outside a span an attempt began."""
    return max(span[0] - attempt.began, attempt.began - span[1], 0)


def _home(attempt: Attempt, spans: Sequence[Span]) -> int:
    """The place of the span that an attempt began in; of two the later."""
    return min(range(len(spans)), key=lambda place: (_apart(attempt, spans[place]), -place))


def _one_after_the_other(
    holds: Iterable[tuple[Span, Submission]],
) -> list[tuple[Span, Submission]]:
    """In order, each cut where an earlier one reaches into it."""
    free, cut = 0, []
    for (begin, end), of in sorted(holds, key=lambda hold: hold[0]):
        if end > max(begin, free) or begin >= free:
            cut.append(((max(begin, free), end), of))
            free = max(free, end)
    return cut


def _waits(submissions: Iterable[Submission], held: Iterable[Span]) -> list[Span]:
    """The waits, once each, without the moments in which something was held."""
    marks = [(span, True) for span in held]
    marks += [(span, False) for submission in submissions for span in submission.waits]
    edges = sorted({edge for span, _ in marks for edge in span})
    found = []
    for begin, end in itertools.pairwise(edges):
        over = [is_hold for (a, b), is_hold in marks if a <= begin and end <= b]
        if over and not any(over):
            found.append((begin, end))
    return found


def _kept_until(attempts: Sequence[Attempt]) -> list[int | None]:
    """For each attempt the step from which later ones began again; None: none did."""
    kept: list[int | None] = []
    lowest: int | None = None
    for attempt in reversed(attempts):
        kept.append(lowest)
        if attempt.from_step is not None:
            lowest = attempt.from_step if lowest is None else min(lowest, attempt.from_step)
    return kept[::-1]


def _row(span: Span, of: Submission, told: Sequence[tuple[Attempt, int | None]]) -> Row:
    """told: the attempts of this span, each with the step from which later ones began again."""
    begin, end = span
    spent = dict.fromkeys(KINDS, 0)
    if not told:
        spent["start"] = end - begin
    cuts = [begin, *(_between(attempt.began, begin, end) for attempt, _ in told[1:]), end]
    for (attempt, kept), part in zip(told, itertools.pairwise(cuts), strict=False):
        for kind, amount in _spend(attempt, part, kept).items():
            spent[kind] += amount
    ours = [attempt for attempt, _ in told]
    steps = [mark.step for attempt in ours for mark in attempt.marks]
    return Row(
        attempt=of.attempt,
        begin=begin,
        end=end,
        spent=spent,
        ranks=ours[-1].ranks if ours else None,
        from_step=ours[0].from_step if ours else None,
        last_step=max(steps, default=None),
        ended=of.kind or (ours[-1].outcome if ours else ""),
    )


def _spend(attempt: Attempt, span: Span, kept: int | None) -> Spent:
    """What an attempt made of the time that it had; the parts sum to that, whatever it says."""
    begin, end = span
    spent = dict.fromkeys(KINDS, 0)
    at = end if attempt.loop_began is None else _between(attempt.loop_began, begin, end)
    spent["restore"] = min(max(attempt.restore, 0), at - begin)
    spent["start"] = at - begin - spent["restore"]
    for mark in attempt.marks:
        until = _between(mark.time, at, end)
        part = _fit(mark.spent, until - at)
        if kept is not None and mark.step > kept:
            part = {"compile": part["compile"], "lost": until - at - part["compile"]}
        for kind, amount in part.items():
            spent[kind] += amount
        at = until
    if attempt.outcome not in KEPT:
        stopped = end if attempt.ended is None else _between(attempt.ended, at, end)
        spent["lost"] += stopped - at
        at = stopped
    spent["idle"] += end - at
    return spent


def _fit(amounts: Mapping[str, int], length: int) -> Spent:
    """The amounts, as far as there is room for them, and what is left over as idle."""
    fitted, left = {}, length
    for kind in IN_LOOP:
        fitted[kind] = min(max(amounts.get(kind, 0), 0), left)
        left -= fitted[kind]
    return {**fitted, "idle": left}


def _between(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


# --- figures ------------------------------------------------------------------------------------


def percentages(amounts: Mapping[str, int], digits: int = 1) -> dict[str, float]:
    """Of the sum, rounded so that those that are shown sum to 100; all 0 of nothing."""
    whole = sum(amounts.values())
    if whole == 0:
        return dict.fromkeys(amounts, 0.0)
    unit = 10**digits
    floors = {name: amount * 100 * unit // whole for name, amount in amounts.items()}
    missing = 100 * unit - sum(floors.values())
    rests = sorted(amounts, key=lambda name: -(amounts[name] * 100 * unit % whole))
    rounded = {name: floors[name] + (name in rests[:missing]) for name in amounts}
    return {name: count / unit for name, count in rounded.items()}
