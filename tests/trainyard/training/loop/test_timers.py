"""Where the time of a step goes, how long data is waited for, and who is slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest

from tests.trainyard.training.small_gpt import Collector, build_loop, build_train_module
from trainyard.testing.pool import RankPool
from trainyard.training.logging.performance import percentile, performance_document
from trainyard.training.logging.run_info import RunInfo
from trainyard.training.logging.timer_report import TimerReport, straggler_lines
from trainyard.training.loop.throughput import DataWait, StepTiming
from trainyard.training.loop.timers import COMPUTE, LEVELS, Timers, timer_lines
from trainyard.training.watch.garbage_collection import GarbageCollection


@pytest.mark.parametrize(
    ("level", "parts"),
    [
        (0, set()),
        (1, {"forward-backward", "all-grads-sync", "optimizer"}),
        (2, set(LEVELS) - {"embedding-grads-all-reduce"}),  # of a pipeline alone
    ],
)
def test_a_level_includes_the_levels_below(level: int, parts: set[str]) -> None:
    timers = Timers(level)
    train_module = build_train_module()
    train_module._options = replace(train_module._options, timed=timers)
    train_module.optimizer.timed = train_module._runner._timed = timers
    build_loop(train_module).run()
    taken = timers.take()
    assert set(taken) == parts
    assert all(ms >= 0 for ms in taken.values())
    if level == 2:
        within = taken["forward-compute"] + taken["backward-compute"]
        assert 0 < within <= taken["forward-backward"]
    assert timers.take() == {}


def test_untimed_parts_cost_nothing() -> None:
    timers = Timers(0, always=COMPUTE)
    assert isinstance(timers("optimizer"), nullcontext)
    with timers("forward-compute"):
        pass
    assert set(timers.take()) == {"forward-compute"}
    assert Timers(1).is_on
    assert not Timers(0).is_on


def test_only_parts_of_level_one_have_a_barrier() -> None:
    calls: list[None] = []
    timers = Timers(2, barrier=lambda: calls.append(None))
    for name in ("forward-backward", "forward-compute", "forward-compute", "optimizer"):
        with timers(name):
            pass
    assert len(calls) == 2


RANKS = [
    {"forward-backward": 10.0, "optimizer": 1.0},
    {"forward-backward": 12.5},
]


@pytest.mark.parametrize(
    ("option", "lines"),
    [
        (
            "minmax",
            [
                "(min, max) time across ranks (ms):",
                "    forward-backward ...............................: (10.00, 12.50)",
                "    optimizer ......................................: (1.00, 1.00)",
            ],
        ),
        (
            "max",
            [
                "max time across ranks (ms):",
                "    forward-backward ...............................: 12.50",
                "    optimizer ......................................: 1.00",
            ],
        ),
        (
            "all",
            [
                "times across ranks (ms):",
                "  forward-backward:",
                "     rank  0: 10.00",
                "     rank  1: 12.50",
                "  optimizer:",
                "     rank  0: 1.00",
            ],
        ),
    ],
)
def test_the_report_has_megatrons_form(option: str, lines: list[str]) -> None:
    assert timer_lines(RANKS, option) == lines
    assert timer_lines([{}, {}], option) == []


def test_the_slowest_ranks_are_named() -> None:
    ranks = [
        {"forward-compute": 1.0 + 0.01 * rank, "backward-compute": 2.0 if rank != 2 else 4.0}
        for rank in range(5)
    ]
    report, late = straggler_lines(ranks, 2)
    assert "min: 3.0 (rank 0), 3.0 (rank 1)" in report
    assert "max: 5.0 (rank 2), 3.0 (rank 4)" in report
    assert late == " slow ranks: 2; the slowest computes 66 % longer than most"
    assert len(straggler_lines(ranks[:2], 1)) == 1


def gather_reports(interval: int) -> tuple[list[str], list[dict[str, float]], dict[str, float]]:
    import torch.distributed as dist

    rank = dist.get_rank()
    lines: list[str] = []
    gauges: dict[str, float] = {}
    timers = Timers(2)
    report = TimerReport(
        timers,
        dist.group.WORLD,
        rank,
        interval,
        num_stragglers=1,
        gauges=gauges,
        write=lines.append,
    )
    collector = Collector([])
    build_loop(build_train_module(), callbacks=[collector]).run()
    for event in collector.events:
        with timers("forward-compute"):
            time.sleep(0.002 * (1 + 2 * rank))
        report.after_step(event)
    return lines, report.last, gauges


@pytest.mark.slow
@pytest.mark.distributed
def test_rank_0_prints_the_times_of_all_ranks(ranks: RankPool) -> None:
    (lines, last, gauges), (others, same, _) = ranks.run(gather_reports, 2, 4)
    assert others == []
    assert last == same
    assert last[1]["forward-compute"] > last[0]["forward-compute"]
    assert next(line for line in lines if line.startswith(" straggler")).count("rank 1") == 1
    assert gauges["forward-compute-time"] == last[0]["forward-compute"] / 1000.0


def test_waiting_for_data_is_measured_for_every_step() -> None:
    def slow() -> Iterator[int]:
        for number in range(3):
            time.sleep(0.01)
            yield number

    beats: list[None] = []
    wait = DataWait(lambda: beats.append(None))
    assert list(wait.watch(slow())) == [0, 1, 2]
    assert wait.take() >= 0.03
    assert wait.take() == 0.0
    assert len(beats) == 3
    collector = Collector([])
    build_loop(build_train_module(), callbacks=[collector]).run()
    for event in collector.events:
        assert event.timing is not None
        assert 0 < event.timing.data_wait_ms < event.timing.ms


@pytest.mark.slow
def test_garbage_is_collected_at_given_steps_and_the_setting_is_restored() -> None:
    import gc

    seen: list[bool] = []

    class Looking(Collector):
        def after_step(self, event: object) -> None:
            seen.append(gc.isenabled())

    assert gc.isenabled()
    build_loop(build_train_module(), callbacks=[GarbageCollection(2), Looking([])]).run()
    assert gc.isenabled()
    assert not any(seen)


# --- the summary ------------------------------------------------------------------------------


def test_the_summary_averages_times_and_not_rates() -> None:
    timings = [
        StepTiming(1, 9000.0, 10.0, 1.0, 0.0, 7),
        StepTiming(2, 100.0, 4000.0, 400.0, 10.0, 8),
        StepTiming(3, 300.0, 1333.0, 133.0, 10.0, 9),
    ]
    info = RunInfo(3, world_size=2, device_name="NVIDIA H100 80GB HBM3")
    document = performance_document(
        timings, info, peaks=[9, 7], planned_bytes=5.0, timers=[{"optimizer": 1.0}, {}]
    )
    assert document["steps_measured"] == 2
    assert document["tokens_per_second_per_gpu"] == pytest.approx(
        2000 * 0.25 + 666.5 * 0.75, abs=0.01
    )
    assert document["mfu"] == pytest.approx((400 * 0.25 + 133 * 0.75) / 989.4, abs=1e-4)
    assert document["step_ms"]["p50"] == 200.0
    assert document["data_wait_share"] == 0.05
    assert document["memory_bytes"] == {"peak": 9, "peak_of_ranks": [9, 7], "planned": 5.0}
    assert document["timers_ms"] == {"optimizer": {"min": 1.0, "max": 1.0}}
    assert performance_document([], info, peaks=[])["steps_measured"] == 0


def test_percentiles_interpolate_between_values() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], share) for share in (0, 50, 75, 100)] == [
        1.0,
        2.5,
        3.25,
        4.0,
    ]
