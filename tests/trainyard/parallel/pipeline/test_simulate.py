"""Schedules played through in time: no deadlock, no more waiting than the formula says."""

from __future__ import annotations

import pytest

from trainyard.parallel.pipeline.program import programs
from trainyard.parallel.pipeline.schedule import (
    Action,
    build_pipeline_schedule,
    choose_group_size,
    fits_group_size,
    input_of,
    output_of,
)
from trainyard.parallel.pipeline.simulate import DeadlockError, simulate, simulate_rendezvous


def group_sizes(pp: int, count: int, chunks: int) -> list[int | None]:
    """All that fit; without chunks there are no groups."""
    if chunks == 1:
        return [None]
    fitting = [n for n in range(1, count + 1) if fits_group_size(pp, count, n)]
    return [*fitting] or [choose_group_size(pp, count)]


def check(pp: int, chunks: int, count: int, group: int | None, forward_only: bool) -> None:
    """Plays to its end with nothing buffered, and loses no time by that; is as long as the formula
    says; sends and receives meet in one order."""
    ours = programs.__wrapped__(pp, chunks, count, group, forward_only)
    schedule = tuple(program.actions for program in ours)
    ideal = simulate(schedule, chunks)
    met = simulate_rendezvous(schedule, chunks, [program.receives for program in ours])
    assert met.makespan == ideal.makespan
    if chunks == 1 or count >= pp:
        slot = 1 if forward_only else 3
        assert ideal.makespan == slot * (chunks * count + pp - 1)
        if not forward_only:
            assert ideal.bubble == pytest.approx((pp - 1) / (chunks * count + pp - 1))


def check_all(pp: int, counts: range, chunk_counts: range, every_group: bool) -> None:
    for chunks in chunk_counts:
        for count in counts:
            sizes = group_sizes(pp, count, chunks)
            for group in sizes if every_group else {sizes[0], sizes[-1]}:
                check(pp, chunks, count, group, forward_only=False)
                check(pp, chunks, count, group, forward_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("pp", range(2, 9))
def test_no_1f1b_schedule_deadlocks_or_idles_more_than_the_formula(pp: int) -> None:
    check_all(pp, range(1, 33), range(1, 2), every_group=True)


@pytest.mark.slow
@pytest.mark.parametrize("pp", range(2, 9))
def test_no_interleaved_schedule_deadlocks_or_idles_more_than_the_formula(pp: int) -> None:
    check_all(pp, range(1, 33, 5), range(2, 4), every_group=False)


@pytest.mark.parametrize("group", [2, 3, 5, 7, 13])
def test_groups_of_any_size_play_to_their_end(group: int) -> None:
    for chunks in (2, 3, 4):
        check(2, chunks, group * 2 + 2, group, forward_only=False)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pp", range(2, 9))
def test_no_schedule_of_any_group_size_deadlocks(pp: int) -> None:
    check_all(pp, range(1, 33), range(1, 5), every_group=True)


@pytest.mark.parametrize(("pp", "chunks", "count"), [(2, 2, 6), (4, 2, 8), (3, 3, 7), (8, 1, 4)])
def test_stages_run_in_order_and_each_message_is_taken_once(
    pp: int, chunks: int, count: int
) -> None:
    played = simulate(build_pipeline_schedule(pp, chunks, count), chunks)
    times = {
        (action.kind, action.microbatch, action.chunk * pp + rank): (start, end)
        for rank, actions in enumerate(played.schedule)
        for action, start, end in zip(actions, played.starts[rank], played.ends[rank], strict=True)
    }
    last = pp * chunks - 1
    for m in range(count):
        for stage in range(1, last + 1):
            assert times["F", m, stage][0] >= times["F", m, stage - 1][1]
            assert times["B", m, stage - 1][0] >= times["B", m, stage][1]
        assert times["B", m, last][0] >= times["F", m, last][1]
    done = [(action, rank) for rank, actions in enumerate(played.schedule) for action in actions]
    sent = [m for a, rank in done if (m := output_of(a, rank, pp, chunks)) is not None]
    taken = [m for a, rank in done if (m := input_of(a, rank, pp, chunks)) is not None]
    assert len(set(sent)) == len(sent) == 2 * count * last
    assert set(taken) == set(sent)


# --- receives ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("pp", "chunks", "count", "group"), [(4, 1, 8, None), (2, 2, 16, 8)])
def test_a_receive_is_posted_once_and_ahead_of_its_action(
    pp: int, chunks: int, count: int, group: int | None
) -> None:
    for program in programs(pp, chunks, count, group):
        slots = {m: slot for slot, posted in enumerate(program.receives) for m in posted}
        assert sum(map(len, program.receives)) == len(slots)
        needed = {m: i for i, m in enumerate(program.inputs) if m is not None}
        assert slots.keys() == needed.keys()
        assert all(slots[m] <= needed[m] for m in needed)


def test_what_comes_early_in_large_groups_is_received_early() -> None:
    # the last rank has chunk 0 of a group done while the first is still busy with it: with one
    # receive ahead alone, they would wait for each other
    late = [
        [tuple(m for m in (message,) if m) for message in (*program.inputs, None)]
        for program in programs(2, 2, 16, 8)
    ]
    schedule = build_pipeline_schedule(2, 2, 16, 8)
    with pytest.raises(DeadlockError, match=r"rank 0: .*; rank 1: "):
        simulate_rendezvous(schedule, 2, late)


def test_a_schedule_that_waits_for_itself_is_an_error() -> None:
    wrong = ((Action("B", 0), Action("F", 0)), (Action("F", 0), Action("B", 0)))
    with pytest.raises(DeadlockError, match=r"rank 0: B0.0 needs gradient of micro-batch 0 from"):
        simulate(wrong, 1)


def test_groups_smaller_than_the_pipeline_would_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "trainyard.parallel.pipeline.schedule.choose_group_size"
    monkeypatch.setattr(where, lambda pp, count, wanted: wanted)
    with pytest.raises(DeadlockError):
        simulate(build_pipeline_schedule(8, 2, 32, 4), 2)


# --- programs ---------------------------------------------------------------------------------


def test_the_last_backward_of_each_chunk_is_marked() -> None:
    for program in programs(4, 2, 8):
        marked = [
            a for a, last in zip(program.actions, program.last_backwards, strict=True) if last
        ]
        assert marked == [Action("B", 7, 1), Action("B", 7, 0)]


def test_a_group_size_gives_way_while_a_growing_batch_is_small() -> None:
    assert programs(4, 2, 6, 8) == programs(4, 2, 6)
    assert programs(4, 2, 16, 8) != programs(4, 2, 16)
