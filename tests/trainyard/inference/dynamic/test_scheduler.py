"""Steps stay within their budgets, every text ends, and the urgent ones end first."""

from __future__ import annotations

import random

import pytest

from trainyard.inference.dynamic.blocks import BlockPool
from trainyard.inference.dynamic.scheduler import NO_SLOT, Scheduler, Sequence, Work

SIZE = 4


def scheduler_of(num_blocks: int, **options: int | bool) -> Scheduler:
    sizes = {"max_requests": 4, "max_tokens": 8} | options
    return Scheduler(BlockPool(num_blocks), SIZE, **sizes)  # type: ignore[arg-type]


def text(number: int, length: int, priority: int = 0) -> Sequence:
    return Sequence(number, priority, [number + 1] * length)


def compute(scheduler: Scheduler, works: list[Work], lengths: dict[int, int]) -> list[int]:
    """What a model would do: a token more for each work that asks for one. Texts that have reached
    their length end; their numbers are returned."""
    ended = []
    for work in works:
        sequence = work.sequence
        if work.is_last:
            sequence.tokens.append(7)
        scheduler.advance(work, work.start + work.num_known)
        if len(sequence.tokens) >= lengths[sequence.number]:
            scheduler.remove(sequence)
            ended.append(sequence.number)
    return ended


def check(scheduler: Scheduler, works: list[Work]) -> None:
    """The rules of a step."""
    scheduler.pool.check()
    assert len(scheduler.running) <= scheduler.max_requests
    assert len(works) == len({work.sequence.number for work in works})
    if scheduler.chunked or len(works) > 1:
        assert sum(work.end - work.start for work in works) <= scheduler.max_tokens
    held = [block for one in scheduler.running for block in one.blocks]
    assert len(set(held)) == scheduler.pool.num_used
    for work in works:
        assert work.sequence in scheduler.running
        assert work.start == work.sequence.num_computed
        assert work.end <= len(work.sequence.blocks) * SIZE
    assert all(not one.blocks and one.slot == NO_SLOT for one in scheduler.waiting)
    slots = [one.slot for one in scheduler.running]
    assert len(set(slots)) == len(slots)
    assert set(slots) <= set(range(scheduler.max_requests))


def run_randomly(seed: int, operations: int) -> int:
    """Texts come, grow, are cancelled; returns how often one was preempted."""
    draw = random.Random(seed)
    scheduler = scheduler_of(
        draw.randint(8, 20),
        max_requests=draw.randint(1, 6),
        max_tokens=draw.randint(6, 24),
        reserve=draw.randint(0, 2),
        chunked=draw.random() < 0.7,
    )
    lengths: dict[int, int] = {}
    alive: dict[int, Sequence] = {}
    guesses = draw.random() < 0.5
    for number in range(operations):
        choice = draw.random()
        if choice < 0.3:
            length = draw.randint(1, 24)
            lengths[number] = length + draw.randint(1, 32 - length)
            alive[number] = Sequence(number, draw.randint(0, 2), [draw.randint(0, 1)] * length)
            scheduler.add(alive[number])
        elif choice < 0.35 and alive:
            scheduler.remove(alive.pop(draw.choice(list(alive))))
        else:
            works = scheduler.schedule((lambda one: (9,) * draw.randint(0, 3)) if guesses else None)
            check(scheduler, works)
            assert works or not alive, "there is work, and nothing is done"
            for ended in compute(scheduler, works, lengths):
                del alive[ended]
    for _ in range(10_000):
        if not alive:
            break
        for ended in compute(scheduler, scheduler.schedule(), lengths):
            del alive[ended]
    assert not alive, "some texts never end"
    assert scheduler.pool.num_used == 0
    return scheduler.preemptions


def test_every_text_ends_under_random_arrivals_and_cancellations() -> None:
    assert sum(run_randomly(seed, 60) for seed in range(8)) > 0


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_text_ends_under_a_million_random_operations() -> None:
    assert sum(run_randomly(seed, 500) for seed in range(2000)) > 0


def test_a_long_prompt_is_cut_and_leaves_a_token_for_each_other_text() -> None:
    scheduler, lengths = scheduler_of(20), {0: 30, 1: 40}
    scheduler.add(text(0, 3))
    compute(scheduler, scheduler.schedule(), lengths)
    scheduler.add(text(1, 30))
    sizes = []
    for _ in range(5):
        works = scheduler.schedule()
        sizes.append([work.end - work.start for work in works])
        compute(scheduler, works, lengths)
    assert sizes == [[1, 7], [1, 7], [1, 7], [1, 7], [1, 2]]


def test_an_admission_leaves_the_reserve_to_the_texts_that_run() -> None:
    scheduler = scheduler_of(4, reserve=1)
    scheduler.add(text(0, 8))
    scheduler.add(text(1, 8))
    assert [work.sequence.number for work in scheduler.schedule()] == [0]
    scheduler = scheduler_of(4, reserve=0, max_tokens=16)
    scheduler.add(text(0, 8))
    scheduler.add(text(1, 8))
    assert [work.sequence.number for work in scheduler.schedule()] == [0, 1]


def test_a_more_urgent_text_takes_the_place_of_a_less_urgent_one() -> None:
    scheduler, lengths = scheduler_of(4, max_requests=1), {0: 12, 1: 12}
    scheduler.add(text(0, 6, priority=5))
    compute(scheduler, scheduler.schedule(), lengths)
    scheduler.add(text(1, 6, priority=1))
    (work,) = [one for one in scheduler.schedule() if one.start == 0]
    assert (work.sequence.number, scheduler.preemptions) == (1, 1)
    scheduler.add(text(2, 6, priority=1))
    assert [one.sequence.number for one in scheduler.schedule()] == [1], "equals wait"


def test_a_text_without_a_block_takes_those_of_the_latest() -> None:
    scheduler, lengths = scheduler_of(4, max_tokens=16), {0: 16, 1: 16}
    scheduler.add(text(0, 8))
    scheduler.add(text(1, 7))
    compute(scheduler, scheduler.schedule(), lengths)
    assert [work.sequence.number for work in scheduler.schedule()] == [0]
    assert [one.number for one in scheduler.waiting] == [1]
    assert scheduler.preemptions == 1


def test_the_beginning_of_a_known_prompt_is_found_but_for_its_last_token() -> None:
    scheduler, lengths = scheduler_of(8, max_tokens=16), {0: 9, 1: 20, 2: 20}
    scheduler.add(Sequence(0, 0, [1] * 8))
    compute(scheduler, scheduler.schedule(), lengths)
    scheduler.add(Sequence(1, 0, [1] * 8))
    scheduler.add(Sequence(2, 0, [1] * 8, finds_blocks=False))
    works = scheduler.schedule()
    assert [(work.start, work.num_known) for work in works] == [(4, 4), (0, 8)]
    assert works[0].sequence.num_found == 4
