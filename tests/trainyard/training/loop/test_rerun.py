"""Whose fault an impossible result is: what is decided, and that a step can be run again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.trainyard.training.small_gpt import (
    TRAINING,
    Collector,
    Counting,
    build_loop,
    build_train_module,
    run_data,
    without_evaluation,
)
from trainyard.datasets.sample_format import Sample
from trainyard.errors import DataError, RerunElsewhere, ValidationFailed
from trainyard.training.loop.rerun import (
    RerunMachine,
    SpikeDetector,
    StepJudge,
    StepSums,
    Suspicion,
)
from trainyard.training.loop.step import TrainModule

NAN = math.nan
HERE, THERE = ("a/cuda:0", "a/cuda:1"), ("b/cuda:0", "b/cuda:1")


def sums(loss: float, norm: float = 1.0, overflow: bool = False) -> StepSums:
    return StepSums(loss, norm, 1.0, False, overflow)


def judged(judge: StepJudge, *results: StepSums) -> StepSums:
    waiting = list(results)
    return judge(7, lambda: waiting.pop(0))


@pytest.mark.parametrize("result", [sums(2.0), sums(2.0, math.inf, overflow=True)])
def test_a_finite_result_or_an_expected_overflow_is_computed_once(result: StepSums) -> None:
    assert judged(StepJudge(RerunMachine(HERE)), result).loss == 2.0


def test_the_same_bad_result_twice_ends_the_run_for_a_rerun_elsewhere() -> None:
    kept: list[Suspicion | None] = []
    with pytest.raises(RerunElsewhere, match=r"both times on a/cuda:0.*other machines") as error:
        judged(StepJudge(RerunMachine(HERE), keep=kept.append), sums(NAN, NAN), sums(NAN, NAN))
    assert error.value.exit_status == 16
    (suspicion,) = kept
    assert suspicion is not None
    again = Suspicion.of_document(suspicion.document())
    assert (again.step, again.where) == (7, HERE)
    assert math.isnan(again.loss)


@pytest.mark.parametrize("second", [(2.001, math.inf), (NAN, NAN), (math.inf, 3.0)])
def test_two_results_with_nan_or_inf_count_as_the_same(
    second: tuple[float, float],
) -> None:
    judge = StepJudge(RerunMachine(HERE))
    with pytest.raises(RerunElsewhere, match=r"most likely diverged.*lower --lr"):
        judged(judge, sums(2.0, math.inf), sums(*second))
    judge = StepJudge(RerunMachine(THERE, SUSPECTED))
    with pytest.raises(ValidationFailed, match=r"the cause is the model or its data.*lower --lr"):
        judged(judge, sums(*second))


def test_another_result_the_second_time_is_a_transient_fault() -> None:
    with pytest.raises(ValidationFailed, match="transient fault") as error:
        judged(StepJudge(RerunMachine(HERE)), sums(NAN), sums(2.0))
    assert error.value.exit_status == 17


SUSPECTED = Suspicion(7, NAN, NAN, HERE)


def test_elsewhere_the_same_result_blames_the_model_and_another_the_machine() -> None:
    forgotten: list[Suspicion | None] = []
    judge = StepJudge(RerunMachine(THERE, SUSPECTED), keep=forgotten.append)
    with pytest.raises(ValidationFailed, match="the cause is the model or its data"):
        judged(judge, sums(NAN, NAN))
    judge = StepJudge(RerunMachine(THERE, SUSPECTED), keep=forgotten.append)
    assert judged(judge, sums(2.0)).loss == 2.0
    assert forgotten == [None, None]


def test_a_rerun_on_the_same_machine_decides_nothing() -> None:
    kept: list[Suspicion | None] = []
    judge = StepJudge(RerunMachine(("a/cuda:1", "b/cuda:0"), SUSPECTED), keep=kept.append)
    with pytest.raises(RerunElsewhere, match="a/cuda:1"):
        judged(judge, sums(NAN, NAN))
    assert kept == [SUSPECTED]


@pytest.mark.parametrize(
    ("second", "words"),
    [(9.0, "gave the same spike"), (9.001, "gave the same spike"), (2.0, "transient fault")],
)
def test_a_spike_is_rerun_and_training_continues(
    second: float, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    judge = StepJudge(RerunMachine(HERE), SpikeDetector())
    for number in range(32):
        judged(judge, sums(2.0 + 0.01 * (number % 3)))
    assert judged(judge, sums(9.0), sums(second)).loss == second
    assert words in caplog.text


def test_noise_and_falling_losses_are_no_spikes() -> None:
    detector = SpikeDetector()
    for number in range(300):
        loss = 10.0 / (1 + 0.02 * number) + 0.1 * math.sin(number * 1.7)
        assert not detector.is_spike(loss), number
        detector.add(loss)
    assert detector.is_spike(6.0)


# --- in a step --------------------------------------------------------------------------------


def with_judge(judge: StepJudge) -> TrainModule:
    train_module = build_train_module(dropout=0.1)
    train_module._options = replace(train_module._options, judge=judge)
    return train_module


def spoil(train_module: TrainModule, should: Callable[[int], bool]) -> None:
    """Multiply the losses of some calls of the model with NaN."""
    model, calls = train_module.chunks[0], iter(range(10**6))
    forward = model.forward_step

    def spoiled(*arguments: object) -> Tensor:
        output: Tensor = forward(*arguments)  # type: ignore[operator]
        return output * NAN if should(next(calls)) else output

    model.forward_step = spoiled  # type: ignore[assignment]


@pytest.mark.slow
def test_a_step_run_twice_is_the_same_step() -> None:
    plain, twice = Collector([]), Collector([])
    build_loop(build_train_module(dropout=0.1), callbacks=[plain]).run()
    judge = StepJudge(None)
    build_loop(with_judge(judge), callbacks=[twice]).run()
    assert twice.events[-1].ledger.text() == plain.events[-1].ledger.text()
    assert judge.differences == [0.0] * 6
    assert "6 steps were run twice, 0 gave another loss" in judge.report()


@pytest.mark.slow
def test_without_a_fault_the_judge_adds_no_computation_and_no_synchronization() -> None:
    """Each micro-batch is taken when the one before is done, and the norm is measured once."""
    order: list[str] = []
    plain, watched = Collector([]), Collector([])
    build_loop(build_train_module(dropout=0.1), callbacks=[plain]).run()
    train_module = with_judge(StepJudge(RerunMachine(HERE)))
    forward, measure = train_module.chunks[0].forward_step, train_module.optimizer.measure

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (order.append(name), call(*given))[1]

    class Watched(Counting):
        def __getitem__(self, index: int) -> Sample:
            order.append("sample")
            return super().__getitem__(index)

    train_module.chunks[0].forward_step = noted("forward", forward)  # type: ignore[assignment]
    train_module.optimizer.measure = noted("norm", measure)  # type: ignore[method-assign]
    data = replace(run_data(train_module, TRAINING, [("valid", Counting())]), train=Watched())
    build_loop(train_module, callbacks=[watched], data=data).run()
    assert watched.events[-1].ledger.text() == plain.events[-1].ledger.text()
    assert order[:13] == ["sample", "sample", "forward"] * 4 + ["norm"]
    assert order.count("norm") == 6


@pytest.mark.parametrize(
    ("spoiled", "error"), [({9}, ValidationFailed), (set(range(8, 99)), RerunElsewhere)]
)
def test_a_fault_saves_the_state_before_the_step(spoiled: set[int], error: type[Exception]) -> None:
    collector = Collector([])
    train_module = with_judge(StepJudge(RerunMachine(HERE)))
    spoil(train_module, lambda call: call in spoiled)  # four micro-batches a step: step 3
    loop = build_loop(train_module, without_evaluation(), [collector])
    with pytest.raises(error):
        loop.run()
    last = collector.events[-1]
    assert (last.record.step, last.is_stopping, last.timing) == (2, True, None)
    assert loop.state.step == 2
    assert train_module.optimizer.num_updates == 2


def test_without_the_check_a_step_with_nan_or_inf_is_skipped_and_counted() -> None:
    collector, train_module = Collector([]), build_train_module()
    spoil(train_module, lambda call: call == 5)
    with pytest.raises(DataError, match="diverged"):
        build_loop(train_module, without_evaluation()).run()
    train_module = with_judge(StepJudge(RerunMachine(HERE)))  # which finds nothing to look into
    train_module._options = replace(train_module._options, check_finite=False)
    spoil(train_module, lambda call: call == 5)
    assert build_loop(train_module, without_evaluation(), [collector]).run() == "finished"
    skipped = [event.record.step for event in collector.events if event.record.skipped]
    assert skipped == [2]
    assert train_module.optimizer.num_updates == 5
