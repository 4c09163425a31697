"""Goodput: laws that hold for any two records, and cases that you can add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.goodput.account import (
    IN_LOOP,
    KINDS,
    Attempt,
    Mark,
    Span,
    Submission,
    account,
    percentages,
)

QUICK = settings(max_examples=30, deadline=None)
HOUR = 3_600_000

moments = st.integers(0, HOUR)


@st.composite
def spans(draw: st.DrawFn) -> tuple[Span, ...]:
    edges = sorted(draw(st.lists(moments, max_size=6)))
    return tuple(zip(edges[::2], edges[1::2], strict=False))


@st.composite
def submissions(draw: st.DrawFn) -> list[Submission]:
    found = [
        Submission(attempt=str(i), waits=draw(spans()), holds=draw(spans()))
        for i in range(draw(st.integers(0, 4)))
    ]
    return [s for s in found if s.waits or s.holds]


marks = st.builds(
    Mark,
    step=st.integers(0, 100),
    time=moments,
    spent=st.fixed_dictionaries(dict.fromkeys(IN_LOOP, st.integers(-10, HOUR))),
)
attempts = st.lists(
    st.builds(
        Attempt,
        began=moments,
        ranks=st.integers(1, 8),
        restore=st.integers(0, HOUR),
        from_step=st.none() | st.integers(0, 100),
        loop_began=st.none() | moments,
        marks=st.lists(marks, max_size=4).map(tuple),
        ended=st.none() | moments,
        outcome=st.sampled_from(["", "failed", "finished", "paused"]),
    ),
    max_size=5,
)


# --- laws ---------------------------------------------------------------------------------------


@pytest.mark.slow
@QUICK
@given(submissions(), attempts)
def test_every_moment_counts_once(drawn: list[Submission], trained: list[Attempt]) -> None:
    found = account(drawn, trained)
    assert sum(found.spent.values()) == found.end - found.begin
    assert min(found.spent.values()) >= 0
    assert set(found.spent) == set(KINDS)
    for row in found.rows:
        assert sum(row.spent.values()) == row.end - row.begin
        assert row.spent["queue"] == row.spent["between"] == 0
    assert sum(row.end - row.begin for row in found.rows) == found.allocated
    ends = [row.end for row in found.rows]
    assert all(end <= row.begin for end, row in zip(ends, found.rows[1:], strict=False))
    for begin, end in (span for submission in drawn for span in submission.holds):
        covered = [(max(r.begin, begin), min(r.end, end)) for r in found.rows]
        assert sum(max(b - a, 0) for a, b in covered) == end - begin


@QUICK
@given(submissions(), attempts, st.integers(0, 100))
def test_old_restart_loses_more(drawn: list[Submission], trained: list[Attempt], back: int) -> None:
    if not trained:
        return
    last = max(range(len(trained)), key=lambda i: trained[i].began)
    step = trained[last].from_step
    if step is None:
        return
    earlier = list(trained)
    earlier[last] = replace(trained[last], from_step=max(step - back, 0))
    before, after = account(drawn, trained), account(drawn, earlier)
    assert after.spent["lost"] >= before.spent["lost"]
    assert after.spent["step"] <= before.spent["step"]
    assert sum(after.spent.values()) == sum(before.spent.values())


@QUICK
@given(st.dictionaries(st.sampled_from(KINDS), st.integers(0, HOUR), min_size=1))
def test_shares_sum_to_100_as_they_are_shown(amounts: dict[str, int]) -> None:
    shares = percentages(amounts)
    tenths = sum(round(10 * share) for share in shares.values())
    assert tenths == (1000 if sum(amounts.values()) else 0)
    whole = sum(amounts.values()) or 1
    assert all(abs(shares[k] - 100 * v / whole) <= 0.1 for k, v in amounts.items())


# --- cases --------------------------------------------------------------------------------------


def mark(number: int, time: int, **spent: int) -> Mark:
    return Mark(step=number, time=time, spent={**dict.fromkeys(IN_LOOP, 0), **spent})


KILLED = Attempt(
    began=20_000,
    from_step=0,
    loop_began=30_000,
    marks=(
        mark(50, 80_000, compile=5_000, step=40_000, data_wait=2_000, checkpoint=3_000),
        mark(100, 130_000, step=49_000, checkpoint=1_000),
    ),
)
AGAIN = Attempt(
    began=225_000,
    restore=4_000,
    from_step=50,
    loop_began=235_000,
    marks=(mark(100, 285_000, step=46_000, checkpoint=4_000),),
    ended=290_000,
    outcome="finished",
)
TOLD = [
    Submission(attempt="a", waits=((0, 10_000),), holds=((10_000, 150_000),), kind="node failure"),
    Submission(attempt="b", waits=((200_000, 220_000),), holds=((220_000, 300_000),), kind="done"),
]


def test_a_kill_after_a_save_that_is_gone_is_added_up() -> None:
    """The second save was damaged: its steps were done again, and what followed it is lost too."""
    found = account(TOLD, [AGAIN, KILLED])
    assert found.spent == {
        "queue": 30_000,
        "start": 20_000 + 11_000,
        "restore": 4_000,
        "compile": 5_000,
        "data_wait": 2_000,
        "step": 40_000 + 46_000,
        "evaluation": 0,
        "checkpoint": 3_000 + 4_000,
        "lost": 50_000 + 20_000,
        "idle": 15_000,
        "between": 50_000,
    }
    assert found.goodput == 86_000 / 220_000
    first, second = found.rows
    assert (first.from_step, first.last_step, first.ended) == (0, 100, "node failure")
    assert (second.from_step, second.last_step, second.ended) == (50, 100, "done")


def test_a_slow_save_is_a_stall_and_nothing_else() -> None:
    slower = replace(AGAIN, marks=(mark(100, 285_000, step=26_000, checkpoint=24_000),))
    before, after = account(TOLD, [KILLED, AGAIN]).spent, account(TOLD, [KILLED, slower]).spent
    moved = {kind: after[kind] - before[kind] for kind in KINDS if after[kind] != before[kind]}
    assert moved == {"step": -20_000, "checkpoint": 20_000}


def test_an_attempt_that_failed_before_training_counts_as_start() -> None:
    found = account([Submission(attempt="a", holds=((0, 7_000),))], [])
    assert found.spent["start"] == found.allocated == 7_000


def test_an_attempt_by_hand_counts_up_to_its_last_record() -> None:
    found = account([], [KILLED])
    assert (found.begin, found.end) == (20_000, 130_000)
    assert [row.attempt for row in found.rows] == ["by hand"]


def test_a_job_that_was_requeued_makes_two_attempts_in_one_submission() -> None:
    holds = ((10_000, 150_000), (220_000, 300_000))
    job = Submission(attempt="a", waits=((0, 10_000), (150_000, 220_000)), holds=holds)
    found = account([job], [KILLED, AGAIN])
    assert found.spent["queue"] == 80_000
    assert found.spent["between"] == 0
    assert found.spent["lost"] == 70_000


def test_nothing_at_all_is_nothing() -> None:
    found = account([], [])
    assert (found.allocated, found.goodput, sum(found.spent.values())) == (0, None, 0)
