"""The batch of every step: Megatron-LM's ramp, tables over tokens, and the length of runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.trainyard.megatron_cli.core_program import ramp_steps
from trainyard.errors import ConfigError
from trainyard.training.loop.batch_size import (
    BatchSizeSchedule,
    build_batch_size_schedule,
    run_length,
)


def batch_sizes(**options: Any) -> BatchSizeSchedule:
    return build_batch_size_schedule(
        **{"global_batch_size": 64, "micro_batch_size": 2, "dp": 2, **options}
    )


def megatrons(consumed: int, start: int, increment: int, samples: int, final: int) -> int:
    """RampupBatchsizeNumMicroBatchesCalculator.update."""
    if consumed > samples:
        return final
    per_increment = samples / ((final - start) // increment)
    return start + int(consumed / per_increment) * increment


def walked(batches: BatchSizeSchedule, steps: int) -> list[int]:
    """Consumed samples before each step of a run and behind its last, step by step."""
    found = [0]
    for _ in range(steps):
        found.append(found[-1] + batches.at(found[-1]).global_batch_size)
    return found


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(1, 400))
def test_the_ramp_is_megatrons_at_every_sample(
    start: int, increment: int, num_steps: int, samples: int
) -> None:
    final = start + increment * num_steps
    batches = batch_sizes(
        global_batch_size=final,
        micro_batch_size=1,
        dp=1,
        rampup_batch_size=(start, increment, samples),
    )
    for consumed in range(samples + 3):
        expected = megatrons(consumed, start, increment, samples, final)
        assert batches.at(consumed).global_batch_size == expected, consumed


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 12), st.integers(1, 400), st.data())
def test_the_computed_length_equals_that_of_a_step_by_step_count(
    start: int, increment: int, num_steps: int, samples: int, data: st.DataObject
) -> None:
    assume(increment or num_steps == 1)
    rampup = (start, increment, samples) if increment else ()
    final = start + increment * num_steps
    batches = batch_sizes(
        global_batch_size=final, micro_batch_size=1, dp=1, rampup_batch_size=rampup
    )
    total = data.draw(st.integers(0, 2 * samples + 50))
    steps = batches.iterations_to(total)
    if rampup:
        assert steps == ramp_steps(lambda n: batches.at(n).global_batch_size, samples, final, total)
    else:
        assert steps == total // final
    for step, consumed in enumerate(walked(batches, steps)):
        assert batches.samples_after(step) == consumed


def test_a_last_batch_beyond_the_samples_counts_as_in_megatron() -> None:
    ramp, table = (
        batch_sizes(rampup_batch_size=(16, 16, 100)),
        batch_sizes(step_batch_size_schedule="0:16 32:48 150:64", seq_length=1),
    )
    assert [ramp.iterations_to(n) for n in (31, 32, 99, 100, 101, 191, 192, 256)] == [
        *(2, 3, 5, 5, 5, 5, 6, 7)
    ]
    assert [table.iterations_to(n) for n in (16, 17, 32, 33, 80, 81, 176, 177)] == [
        *(1, 2, 2, 3, 3, 4, 5, 6)
    ]
    assert batch_sizes().iterations_to(127) == 1
    assert batch_sizes(step_batch_size_schedule="0:64").iterations_to(65) == 2


def test_the_ramp_of_the_largest_gpt3_is_as_published() -> None:
    batches = batch_sizes(
        global_batch_size=1536, micro_batch_size=1, dp=8, rampup_batch_size=(16, 16, 5859375)
    )
    assert batches.at(0).global_batch_size == 16
    assert batches.at(0).num_microbatches == 2
    assert batches.at(61677).global_batch_size == 16
    assert batches.at(61678).global_batch_size == 32
    assert batches.at(5859374).global_batch_size == 1520
    assert batches.at(5859375).global_batch_size == 1536
    assert len(batches.phases) == 96
    steps, _ = run_length(batches, None, 146_484_375)  # 300 billion tokens of 2,048
    assert steps == pytest.approx((146_484_375 - 5_859_375) / 1536 + 19_600, rel=0.01)


def test_a_small_ramp_has_its_golden_sequence() -> None:
    batches = batch_sizes(rampup_batch_size=(16, 16, 100))
    sizes = [batches.at(consumed).global_batch_size for consumed in walked(batches, 9)[:-1]]
    assert sizes == [16, 16, 16, 32, 48, 64, 64, 64, 64]


def test_a_table_sets_batch_sizes_by_tokens() -> None:
    batches = batch_sizes(
        global_batch_size=None,
        micro_batch_size=4,
        dp=8,
        seq_length=1024,
        step_batch_size_schedule="0:768 1.5M:1536 250B:3072",
    )
    assert batches.at(0).global_batch_size == 768
    assert batches.at(1463).global_batch_size == 768
    assert batches.at(1464).global_batch_size == 1536, "1,464 samples are 1,499,136 tokens"
    assert batches.at(250 * 10**9 // 1024 - 1).global_batch_size == 1536
    assert batches.at(250 * 10**9 // 1024).global_batch_size == 3072
    assert batches.final.num_microbatches == 96


def test_a_batch_that_ranks_do_not_fill_may_be_lowered() -> None:
    assert batch_sizes(global_batch_size=63, decrease_if_needed=True).final.global_batch_size == 60
    ramp = batch_sizes(rampup_batch_size=(8, 14, 100), decrease_if_needed=True)
    assert [phase.global_batch_size for phase in ramp.phases] == [8, 20, 36, 48, 64]
    with pytest.raises(ConfigError, match=r"near it: 4$"):
        batch_sizes(global_batch_size=3, decrease_if_needed=True)


def test_a_constant_batch_size_is_filled_by_micro_batches() -> None:
    for size, count in ((None, 1), (24, 3)):
        built = build_batch_size_schedule(global_batch_size=size, micro_batch_size=4, dp=2)
        assert built.final.num_microbatches == count
    with pytest.raises(ConfigError, match=r"--global-batch-size \(20\).*= 8; near it: 16 or 24"):
        build_batch_size_schedule(global_batch_size=20, micro_batch_size=4, dp=2)
    assert run_length(batch_sizes(), 10, None) == (10, 640)
    assert run_length(batch_sizes(), None, 650) == (10, 650)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch_size": 10}, r"--global-batch-size \(10\).*= 4; near it: 8 or 12 \(--decr"),
        ({"rampup_batch_size": (16, 16)}, "takes three numbers"),
        ({"rampup_batch_size": (16, 0, 9)}, "must be at least 1"),
        ({"rampup_batch_size": (16, 20, 9)}, r"steps of 20 from 16 do not lead to .*\(64\)"),
        ({"rampup_batch_size": (80, 4, 9)}, "do not lead"),
        ({"rampup_batch_size": (10, 6, 9)}, "--rampup-batch-size: the size 10 must be divisible"),
        ({"step_batch_size_schedule": "0-64"}, "'0-64' is not TOKENS:SIZE"),
        ({"step_batch_size_schedule": "1M:64"}, "must begin at 0 tokens"),
        ({"step_batch_size_schedule": "0:32 xM:64"}, "'xM:64' is not TOKENS:SIZE"),
        ({"step_batch_size_schedule": "0:32 1K:0"}, "'1K:0' is not TOKENS:SIZE"),
        (
            {"step_batch_size_schedule": "0:32 2M:48 2000.5K:64", "seq_length": 2048},
            r"batches of 48 and 64 begin at the same sample \(976\); .*--seq-length \(2048\)",
        ),
        ({"step_batch_size_schedule": "0:32 2M:48"}, "its last batch size 48 must equal"),
        (
            {"step_batch_size_schedule": "0:64", "rampup_batch_size": (16, 16, 100)},
            "not both",
        ),
    ],
)
def test_invalid_sizes_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        batch_sizes(**options)


def test_iterations_of_a_batch_that_grows_are_its_own_steps() -> None:
    ramp = batch_sizes(rampup_batch_size=(16, 16, 100))
    assert run_length(ramp, 3, None) == (3, 48)
    assert run_length(ramp, 8, None) == (8, 320)
    table = batch_sizes(step_batch_size_schedule="0:16 48:64")
    assert run_length(table, 5, None) == (5, 3 * 16 + 2 * 64)


def test_runs_without_a_length_are_refused() -> None:
    for lengths in ((None, None), (1, 1)):
        with pytest.raises(ConfigError, match="--train-iters or --train-samples"):
            run_length(batch_sizes(), *lengths)
    with pytest.raises(ConfigError, match="less than the first batch"):
        run_length(batch_sizes(), None, 63)
