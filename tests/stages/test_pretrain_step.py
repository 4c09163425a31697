"""A training that does not come to its end says after which step that was."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flows.backends.outcome import Kind, StageError, classify, read_failure
from stages.pretrain.progress_file import ProgressFile
from stages.runtime.failure import RUN_DIR, STEP_DIGITS, add_step, read_step
from tests.stages.directly import run_program
from tests.stages.pretrain_runs import Pretrain, arguments
from trainyard.training.loop.state import TrainState

DIVERGES = {"rerun_mode": "disabled", "eval_iters": 0, "clip_grad": 0}


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "runs"))
    return tmp_path / "runs"


def train(tokens: str, save: Path, **options: Any) -> None:
    run_program("stages.pretrain", *arguments(tokens, save, **options), expect=1)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e20, 1e30])
def test_the_report_of_a_divergence_has_its_step(
    tokens: str, tmp_path: Path, run_folder: Path, rate: float
) -> None:
    train(tokens, tmp_path / "save", lr=rate, **DIVERGES)
    failure = read_failure(str(run_folder))
    assert failure is not None
    failed = re.match(r"step (\d+): ", failure["message"])
    assert failed is not None
    assert failure["step"] == int(failed[1]) - 1
    outcome = classify("pretrain", 1, failure)
    assert (outcome.kind, outcome.step) == (Kind.DATA, failure["step"])
    words = f"pretrain: fault in the data after step {failure['step']}: step {failed[1]}: "
    assert str(StageError(outcome)).startswith(words)


def test_the_report_of_a_run_without_a_step_has_no_step(
    tokens: str, tmp_path: Path, run_folder: Path
) -> None:
    train(tokens, tmp_path / "save", init_method_std=1e30, **DIVERGES)
    failure = json.loads((run_folder / "failure.json").read_text())
    assert failure["message"].startswith("step 1: ")
    assert "step" not in failure


@pytest.mark.slow
def test_the_reported_step_counts_all_attempts(
    pretrain: Pretrain, tmp_path: Path, run_folder: Path
) -> None:
    given = partial(pretrain, tmp_path / "save", exit_interval=3)
    for step in (3, 6):
        given(expect=143)
        failure = read_failure(str(run_folder))
        assert failure is not None
        assert (failure["class"], failure["step"]) == ("StoppedByOption", step)
    given()
    assert read_failure(str(run_folder)) is None


def test_a_step_counts_once_it_is_done_and_not_when_it_is_saved() -> None:
    state, progress = TrainState(step=4), ProgressFile()
    assert progress.step is None
    progress.begin(state)
    assert progress.step == 4
    state.step = 5  # a callback that saves it may fail
    assert progress.step == 5


def test_a_parent_reads_the_step_that_its_first_rank_wrote(tmp_path: Path) -> None:
    file = tmp_path / "step"
    assert read_step(file) is None
    progress = ProgressFile(file)
    assert read_step(file) is None
    progress.begin(TrainState(step=123_456))
    progress._write(99)
    assert read_step(file) == 99
    assert file.stat().st_size == STEP_DIGITS


def test_an_error_without_steps_is_unchanged() -> None:
    for step in (None, 0):
        error = ValueError("x")
        add_step(error, step)
        assert vars(error) == {}
