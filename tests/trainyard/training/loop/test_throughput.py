"""Timings of many steps are those that were added, in little memory."""

from __future__ import annotations

import tracemalloc

from trainyard.training.loop.throughput import StepTiming, StepTimings


def timing(step: int) -> StepTiming:
    return StepTiming(step, 100.5, 1e5 / (step + 1), 30.0, 0.25, 10**12 + step)


def test_columns_of_timings_are_a_sequence_of_timings() -> None:
    every, columns = [timing(step) for step in range(10)], StepTimings()
    for one in every:
        columns.append(one)
    assert list(columns) == every
    assert list(columns[3:]) == every[3:]
    assert (columns[-1], len(columns)) == (every[-1], 10)
    assert isinstance(columns[0].step, int)
    assert not StepTimings()[1:]


def test_a_step_takes_48_bytes() -> None:
    columns = StepTimings()
    tracemalloc.start()
    try:
        for step in range(5000):
            columns.append(timing(step))
        assert tracemalloc.get_traced_memory()[0] < 60 * 5000
    finally:
        tracemalloc.stop()
