"""The loop: what it records, when it measures, when it ends, and that it can be cut anywhere."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.trainyard.training.small_gpt import (
    LENGTH,
    TRAINING,
    Collector,
    build_loop,
    build_train_module,
    model_of,
    moments_of,
)
from trainyard.errors import ConfigError
from trainyard.training.logging.console import Console
from trainyard.training.logging.run_info import RunInfo
from trainyard.training.loop.events import StepEvent
from trainyard.training.loop.ledger import Ledger, chain, parse_ledger
from trainyard.training.loop.length import length_of, num_samples
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.throughput import Workload, summary
from trainyard.training.options.training import TrainingConfig


def events_of(training: TrainingConfig = TRAINING, dropout: float = 0.1) -> list[StepEvent]:
    collector = Collector([])
    build_loop(build_train_module(training, dropout), training, [collector]).run()
    return collector.events


def test_a_run_is_the_same_bit_for_bit_every_time() -> None:
    first, second = (events_of()[-1].ledger for _ in range(2))
    assert first.text() == second.text()
    assert first.digest == second.digest == chain(first.lines)


def test_the_ledger_counts_samples_and_tokens_and_reads_back_to_the_same_bits() -> None:
    events = events_of()
    lines = parse_ledger(events[-1].ledger.text())
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["consumed_train_samples"] for line in lines] == [8, 16, 24, 32, 40, 48]
    assert lines[-1]["tokens"] == 48 * LENGTH
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6]
    assert [line["lm_loss"] for line in lines] == [event.record.lm_loss for event in events]
    assert len({line["samples"] for line in lines}) == 6
    assert lines[0]["learning_rate"] == 0.01


@pytest.mark.slow
def test_the_loss_falls() -> None:
    training = replace(TRAINING, train_iters=40, eval_interval=40, eval_at_start=True)
    train_module = build_train_module(training)
    collector = Collector([])
    build_loop(train_module, training, [collector]).run()
    first, last = (collector.events[i].record.validation_loss or 0.0 for i in (0, -1))
    assert last < first - 0.5


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    whole = build_train_module(dropout=0.2)
    build_loop(whole, callbacks=[collector := Collector([])]).run()

    cut = build_train_module(dropout=0.2)
    short = replace(TRAINING, exit_interval=4)
    loop = build_loop(cut, short)
    assert loop.run() == "paused"
    assert loop.state.step == 4
    continued = build_train_module(dropout=0.2, seed=99)
    model_of(continued).load_state_dict(model_of(cut).state_dict())
    kept = moments_of(cut)
    for box in continued.optimizer.state_boxes():
        box.tensor.copy_(kept[box.name])
    continued.optimizer.load_state_dict(json.loads(json.dumps(cut.optimizer.state_dict())))
    state = TrainState()
    state.load_state_dict(json.loads(json.dumps(loop.state.state_dict())))
    ledger = Ledger(state.ledger_digest, loop.ledger.lines)
    rest = build_loop(continued, state=state, ledger=ledger)
    assert rest.run() == "finished"

    assert rest.ledger.text() == collector.events[-1].ledger.text()
    assert rest.ledger.digest == chain(rest.ledger.lines)
    for name, tensor in model_of(whole).state_dict().items():
        assert torch.equal(tensor, model_of(continued).state_dict()[name]), name


def test_a_request_to_stop_ends_the_loop_after_the_step() -> None:
    collector = Collector([])
    answers = iter([False, False, True])
    loop = build_loop(
        build_train_module(), callbacks=[collector], stop_requested=lambda: next(answers)
    )
    assert loop.run() == "stopped"
    assert loop.state.step == 3
    assert [event.is_stopping for event in collector.events] == [False, False, True]


def test_validation_runs_at_the_interval_the_end_and_optionally_the_start() -> None:
    base = replace(TRAINING, train_iters=10, eval_interval=4)
    other = replace(base, eval_interval=5)
    assert base.evaluation_steps(10) == [4, 8, 10]
    assert replace(base, eval_at_start=True).evaluation_steps(10) == [0, 4, 8, 10]
    assert replace(base, eval_iters=0).evaluation_steps(10) == []
    assert num_samples(base, length_of(base, 1, LENGTH)) == (80, 24, 8)
    assert num_samples(other, length_of(other, 1, LENGTH)) == (80, 24, 8)
    none = replace(base, eval_iters=0)
    assert num_samples(none, length_of(none, 1, LENGTH)) == (80, 0, 0)


def test_the_console_line_has_megatrons_fields_in_order() -> None:
    lines: list[str] = []
    console = Console(RunInfo(6), interval=2, show_throughput=True, write=lines.append)
    build_loop(build_train_module(), callbacks=[console]).run()
    steps = [line for line in lines if " iteration " in line and "consumed" in line]
    assert len(steps) == 3
    fields = [field.split(":")[0].strip() for field in steps[0].split("|")[1:-1]]
    assert fields == [
        "consumed samples",
        "elapsed time per iteration (ms)",
        "tokens per GPU (tokens/s/GPU)",
        "throughput per GPU (TFLOP/s/GPU)",
        "FLOP convention",
        "learning rate",
        "global batch size",
        "lm loss",
        "loss scale",
        "grad norm",
        "number of skipped iterations",
        "number of nan iterations",
        "data wait (%)",
        "time left",
    ]
    assert "iteration        2/       6 |" in steps[0]
    assert any(
        line.startswith(" validation loss at iteration 3 | lm loss value: ") for line in lines
    )


def test_figures_of_a_step_follow_from_its_time() -> None:
    work = Workload(tokens_per_sample=125, flops_per_sample=2.5e11, world_size=4)
    timing = work.timing(1, 0.5, torch.device("cpu"), 8)
    assert (timing.ms, timing.tokens_per_second, timing.tflops_per_gpu) == (500.0, 2000.0, 1.0)
    assert json.loads(timing.line())["tokens_per_second"] == 2000.0
    assert summary([timing])["tokens_per_second"] == 2000.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batch_size": 0}, "--micro-batch-size"),
        ({"save_interval": 0}, "--save-interval"),
        ({"eval_iters": -1}, "--eval-iters"),
        ({"seed": -1}, "--seed"),
        ({"exit_signal_handler": False}, "--no-exit-signal-handler"),
        ({"exit_duration_in_mins": 0.0}, "--exit-duration-in-mins"),
        ({"eval_iters": 0, "eval_at_start": True}, "--eval-at-start"),
    ],
)
def test_invalid_intervals_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(TRAINING, **options)  # type: ignore[arg-type]


def test_skipped_steps_have_no_speed() -> None:
    collector = Collector([])
    training = replace(TRAINING, iterations_to_skip=(2, 4))
    assert build_loop(build_train_module(training), training, [collector]).run() == "finished"
    timed = [event.record.step for event in collector.events if event.timing is not None]
    assert timed == [1, 3, 5, 6]
    waits = [event.timing for event in collector.events if event.timing is not None]
    assert all(timing.data_wait_ms <= timing.ms for timing in waits)
