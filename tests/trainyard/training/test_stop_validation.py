"""A request to stop during a validation: the step is saved, and the measurement made good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.training.small_gpt import TRAINING, build_loop, build_train_module
from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_manifest
from trainyard.checkpoint.background import BackgroundSave
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.ranks import ALONE as ONE_RANK
from trainyard.checkpoint.steps import find_steps, step_folder
from trainyard.errors import ConfigError
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.ledger import EvaluationLosses
from trainyard.training.loop.loop import Outcome
from trainyard.training.loop.step import TrainModule
from trainyard.training.options.training import TrainingConfig
from trainyard.training.run.checkpointing import Checkpointing, SaveTarget
from trainyard.training.run.dp_history import DpSpan, spans_of_step
from trainyard.training.run.run_steps import FoundSteps, find_own_steps, resume, whole_ledger

NOTHING = FoundSteps()
FOUR_BATCHES = 4  # of a measurement: 8 samples, 2 at once


class Lines(Callback):
    """The steps whose time was taken, and those measured."""

    def __init__(self) -> None:
        self.timed: list[int] = []
        self.measured: list[int] = []

    def after_step(self, event: StepEvent) -> None:
        if event.timing is not None:
            self.timed.append(event.record.step)
        if event.record.validation_loss is not None:
            self.measured.append(event.record.step)


def saver(
    folder: Path,
    training: TrainingConfig,
    train_module: TrainModule,
    found: FoundSteps = NOTHING,
    spans: tuple[DpSpan, ...] = (),
) -> Checkpointing:
    return Checkpointing(
        SaveTarget(str(folder), "l", "pretrain", {}, {}),
        train_module,
        training.save_interval,
        retain_interval=training.save_retain_interval,
        keep_last=training.save_keep_last,
        micro_batch_size=training.micro_batch_size,
        facts={"global_batch_size": 8},
        staying=found.staying,
        passing=found.passing,
        spans=spans,
        background=BackgroundSave(ONE_RANK) if training.async_save else None,
    )


def go_on(
    folder: Path, training: TrainingConfig, stop: Callable[[], bool], heard: Lines
) -> Outcome:
    """Continue the run of a folder as the stage does."""
    train_module = build_train_module(training, dropout=0.1)
    found = find_own_steps(str(folder), "l") if folder.exists() else FoundSteps()
    state, ledger, spans = None, None, ()
    if found.latest is not None:
        with open_checkpoint(str(folder / step_folder(found.latest))) as checkpoint:
            state, ledger = resume(checkpoint, train_module, 8)
        spans = spans_of_step(str(folder), found.latest)
    saving = saver(folder, training, train_module, found, spans)
    callbacks = [heard, saving]
    loop = build_loop(train_module, training, callbacks, state, ledger, stop_requested=stop)
    return loop.run()


def contents(folder: Path) -> tuple[bytes, dict[int, str]]:
    found = find_own_steps(str(folder), "l")
    manifests = {k: read_manifest(f"{folder}/iter_{k:07d}/manifest.json") for k in found.staying}
    assert found.passing == ()
    ledger = whole_ledger(str(folder), found.staying)
    return ledger, {k: m[0].output_digest for k, m in manifests.items() if m is not None}


def at_look(place: int) -> Callable[[], bool]:
    """True once: when it is asked for the time of that number."""
    calls = count(1)
    return lambda: next(calls) == place


@pytest.mark.slow
def test_retention_keeps_few_steps_and_the_whole_ledger(tmp_path: Path) -> None:
    few = replace(TRAINING, save_interval=1, save_retain_interval=4, save_keep_last=2)
    there: dict[int, list[int]] = {}

    class Watch(Callback):
        def after_step(self, event: StepEvent) -> None:
            there[event.record.step] = find_steps(str(tmp_path / "few"))

    train_module = build_train_module(few, dropout=0.1)
    saving = saver(tmp_path / "few", few, train_module)
    assert build_loop(train_module, few, [saving, Watch()]).run() == "finished"
    assert there == {1: [1], 2: [1, 2], 3: [2, 3], 4: [3, 4], 5: [4, 5], 6: [4, 5, 6]}
    assert find_own_steps(str(tmp_path / "few"), "l") == FoundSteps((4, 6), (5,))
    assert [report.step for report in saving.reports] == [1, 2, 3, 4, 5, 6]
    go_on(tmp_path / "all", replace(TRAINING, save_interval=1), lambda: False, Lines())
    expected, digests = contents(tmp_path / "all")
    assert whole_ledger(str(tmp_path / "few"), (4, 6)) == expected
    assert len(digests) == 6


def test_retained_steps_must_be_saved_steps() -> None:
    with pytest.raises(ConfigError, match=r"--save-retain-interval 5 must be a multiple .* \(2\)"):
        replace(TRAINING, save_interval=2, save_retain_interval=5)
    with pytest.raises(ConfigError, match="--save-keep-last must be at least 1"):
        replace(TRAINING, save_keep_last=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "saving",
    [
        {"save_interval": 2},
        {"save_interval": 3},
        {"save_interval": 1, "save_retain_interval": 4},
        {"save_interval": 1, "async_save": True},
    ],
    ids=["every 2", "every 3", "few kept", "in the background"],
)
def test_a_run_stopped_anywhere_ends_as_the_undisturbed(
    tmp_path: Path, saving: dict[str, Any]
) -> None:
    training = replace(TRAINING, eval_at_start=True, **saving)
    assert go_on(tmp_path / "whole", training, lambda: False, Lines()) == "finished"
    expected = contents(tmp_path / "whole")
    calls = count(1)
    assert go_on(tmp_path / "n", training, lambda: not next(calls), Lines()) == "finished"
    asked = next(calls) - 1  # how often a run looks
    assert asked == 6 + 3 * (FOUR_BATCHES + 1)
    # Once for every place in a measurement: at the start, at step 3, at the last.
    for place in (1, 4, 9, 10, 12, 17, 18, asked - 1):
        folder, heard, stop = tmp_path / f"at-{place}", Lines(), at_look(place)
        outcomes = [go_on(folder, training, stop, heard)]
        assert outcomes[0] == "stopped", place
        while outcomes[-1] != "finished":
            outcomes.append(go_on(folder, training, stop, heard))
        assert contents(folder) == expected, place
        assert heard.timed == [1, 2, 3, 4, 5, 6]
        assert heard.measured == [0, 3, 6]


@pytest.mark.slow
def test_a_stop_takes_effect_between_the_batches_of_a_validation(tmp_path: Path) -> None:
    calls = count(1)
    # Three steps look once each; the fifth look is before the second batch of the measurement.
    assert go_on(tmp_path / "run", TRAINING, lambda: next(calls) >= 5, Lines()) == "stopped"
    assert next(calls) == 6
    found = find_own_steps(str(tmp_path / "run"), "l")
    assert found == FoundSteps(passing=(3,))
    state = store.read_json(str(tmp_path / "run/iter_0000003/state.json"))
    assert state["unmeasured"]["step"] == 3
    assert b'"step": 3' not in (tmp_path / "run/iter_0000003/ledger.jsonl").read_bytes()
    # Stopped again before it is made good: nothing is written anew, nothing is lost.
    heard = Lines()
    assert go_on(tmp_path / "run", TRAINING, lambda: True, heard) == "stopped"
    assert (heard.timed, heard.measured) == ([], [])
    assert go_on(tmp_path / "run", TRAINING, lambda: False, heard) == "finished"
    assert heard.measured == [3, 6]


def test_ranks_with_fewer_batches_wait_for_those_with_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank without batches goes on agreeing for as long as another has some."""
    train_module = build_train_module()
    others = iter([(0, 1), (0, 1), (0, 0)])
    seen: list[tuple[bool, ...]] = []

    def agree(*flags: bool) -> list[bool]:
        seen.append(flags)
        return [bool(own or other) for own, other in zip(flags, next(others), strict=True)]

    monkeypatch.setattr(train_module, "_any_rank", agree)
    assert train_module.evaluate(iter([]), 0) == EvaluationLosses(0.0)
    assert seen == [(False, False)] * 3
    others = iter([(0, 1), (1, 1)])
    assert train_module.evaluate(iter([]), 0) is None
