"""Runs that end before their last step: saved step, performance summary, resumption."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.pretrain.config import PretrainConfig
from stages.pretrain.run import run
from tests.stages.directly import run_directly
from tests.stages.pretrain_runs import SMALL, ledger, manifest
from trainyard.config import from_dict
from trainyard.errors import DataError, HostMemoryError, StoppedByOption
from trainyard.models.gpt.model import GPTModel
from trainyard.training.options.pretrain import PretrainConfig as LibraryConfig
from trainyard.training.pretrain import pretrain

SPEED = "performance.json"

BASE: dict[str, Any] = {
    **SMALL,
    "split": "90,10,0",
    "eval_iters": 1,
    "eval_interval": 4,
    "save_performance_summary": True,
}


@pytest.fixture
def train(tokens: str) -> Callable[..., dict[str, Any]]:
    def train(save: Path, **options: Any) -> dict[str, Any]:
        paths = {"data_path": [tokens], "save": str(save)}
        return run_directly(PretrainConfig, run, **{**BASE, **paths, **options})

    return train


def summary(save: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((save / SPEED).read_text())
    assert document["memory_bytes"]["peak"] > 0
    return document


def losing(step: int, error: BaseException | None = None) -> Callable[..., Tensor]:
    """A model whose loss of a step is NaN, or whose step fails so."""
    forward, calls = GPTModel.forward_step, [0]

    def broken(self: GPTModel, hidden: Tensor | None, batch: Any) -> Tensor:
        calls[0] += 1
        output = forward(self, hidden, batch)
        if calls[0] <= 2 * (step - 1):  # of two micro-batches each
            return output
        if error is not None:
            raise error
        return output * math.nan

    return broken


# --- stopped by an option -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "by", "steps"),
    [
        ({"exit_duration_in_mins": 1e-7}, "--exit-duration-in-mins", [1, 2]),
        ({"exit_interval": 3}, "--exit-interval", [3]),
    ],
    ids=["duration", "interval"],
)
def test_a_run_stopped_by_an_option_is_saved_and_resumes_to_the_same_end(
    train: Callable[..., dict[str, Any]],
    tmp_path: Path,
    option: dict[str, Any],
    by: str,
    steps: list[int],
) -> None:
    train(tmp_path / "whole")
    save = tmp_path / "run"
    for step in steps:  # each time one step further, or to the next that the interval divides
        with pytest.raises(StoppedByOption, match=f"stopped by {by}") as stopped:
            train(save, **option)
        assert stopped.value.exit_status == 143
        assert (save / f"iter_{step:07d}" / "manifest.json").exists()
        written = summary(save)
        assert (written["finished"], written["ended"]) == (False, f"stopped: {by}")
        assert (written["last_step"], written["steps"]) == (step, 6)
        assert written["step_ms"]["max"] > 0
        assert len(written["memory_bytes"]["peak_of_ranks"]) == 1
    assert train(save)["steps"] == 6
    assert (summary(save)["finished"], summary(save)["ended"]) == (True, "finished")
    assert ledger(save) == ledger(tmp_path / "whole")


def test_a_stop_at_the_last_step_finishes_the_run(
    train: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    assert train(tmp_path, exit_interval=6)["steps"] == 6
    assert summary(tmp_path)["ended"] == "finished"


# --- failed -------------------------------------------------------------------------------------


def test_a_diverged_run_writes_its_summary_and_keeps_its_error(
    train: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPTModel, "forward_step", losing(3))
    with pytest.raises(DataError, match="step 3: loss nan") as error:
        train(tmp_path, rerun_mode="disabled")
    written = summary(tmp_path)
    assert written["finished"] is False
    assert written["ended"].startswith("failed: DataError: step 3: loss nan")
    assert written["ended"].removeprefix("failed: DataError: ") in str(error.value)
    assert (written["last_step"], written["steps_measured"]) == (2, 1)
    assert written["memory_bytes"]["of_rank"] == 0
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("step", [1, 3])
def test_a_run_out_of_memory_reports_its_memory_at_any_step(
    train: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    monkeypatch.setattr(GPTModel, "forward_step", losing(step, full))
    with pytest.raises(HostMemoryError, match="rank 0 ran out of memory"):
        train(tmp_path)
    written = summary(tmp_path)
    assert written["ended"].startswith("failed: HostMemoryError: rank 0 ran out of memory")
    assert written["last_step"] == (None if step == 1 else 2)
    assert written["memory_bytes"]["planned"] > 0


def test_a_failed_write_does_not_hide_the_error(
    train: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / SPEED).mkdir()  # in the way
    monkeypatch.setattr(GPTModel, "forward_step", losing(3))
    with pytest.raises(DataError, match="step 3: loss nan"):
        train(tmp_path, rerun_mode="disabled")
    assert f"cannot write {SPEED} of the failed run" in caplog.text


def test_without_the_option_no_summary_is_written(
    train: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPTModel, "forward_step", losing(3))
    with pytest.raises(DataError):
        train(tmp_path, rerun_mode="disabled", save_performance_summary=False)
    assert not (tmp_path / SPEED).exists()


@pytest.mark.slow
def test_a_library_call_writes_the_same_summary_and_keeps_that_of_a_finished_run(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = tmp_path / "run"

    def call(**options: Any) -> str:
        document = {**BASE, "data_path": [tokens], "save": str(save), **options}
        return pretrain(None, None, from_dict(LibraryConfig, document)).outcome

    assert call(exit_interval=4) == "paused"
    assert summary(save)["ended"] == "stopped: --exit-interval"
    assert call(save_performance_summary=False) == "finished"
    assert not (save / SPEED).exists()  # it would say that the run is not finished
    assert call(seed=2, new_run=True) == "finished"
    kept = (save / SPEED).read_bytes()
    monkeypatch.setattr(GPTModel, "forward_step", losing(3))
    with pytest.raises(DataError, match="step 3"):
        call(seed=3, new_run=True, rerun_mode="disabled")
    assert (save / SPEED).read_bytes() == kept
    assert SPEED in [file.path for file in manifest(save).files]


# --- other rhythms --------------------------------------------------------------------------------


def test_skipped_steps_consume_their_samples(
    train: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    train(tmp_path / "all")
    train(tmp_path / "run", iterations_to_skip=[2, 5])
    plain, skipping = ledger(tmp_path / "all"), ledger(tmp_path / "run")
    assert [line["step"] for line in skipping if line.get("passed_over")] == [2, 5]
    assert skipping[0] == plain[0]
    for one, other in zip(skipping, plain, strict=True):  # the samples are gone all the same
        assert one["samples"] == other["samples"]
        assert one["consumed_train_samples"] == other["consumed_train_samples"]
    for step in (2, 5):
        assert "lm_loss" not in skipping[step - 1]
    # The rates go on where they were.
    assert skipping[2]["learning_rate"] == plain[1]["learning_rate"]
    state = json.loads((tmp_path / "run/iter_0000006/state.json").read_text())
    assert (state["num_updates"], state["step"]) == (4, 6)


@pytest.mark.slow
def test_manual_garbage_collection_does_not_change_the_result(
    train: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "plain")
    collected: list[int] = []

    def heard(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected.append(info["generation"])

    forward, enabled = GPTModel.forward_step, set()

    def looking(self: GPTModel, hidden: Tensor | None, batch: Any) -> Tensor:
        enabled.add(gc.isenabled())
        return forward(self, hidden, batch)

    monkeypatch.setattr(GPTModel, "forward_step", looking)
    gc.callbacks.append(heard)
    try:
        train(tmp_path / "run", manual_gc=True, manual_gc_interval=2)
    finally:
        gc.callbacks.remove(heard)
    assert enabled == {False}
    assert gc.isenabled()
    # At the beginning, and after steps 2, 4 (a measurement as well) and 6.
    assert collected.count(2) >= 4
    assert ledger(tmp_path / "run") == ledger(tmp_path / "plain")
