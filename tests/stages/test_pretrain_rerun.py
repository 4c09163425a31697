"""A step with an impossible result, run again here and on another machine."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from stages.pretrain.config import PretrainConfig
from stages.pretrain.run import run
from tests.stages.directly import run_directly
from tests.stages.pretrain_runs import SMALL, ledger
from trainyard.errors import RerunElsewhere, ValidationFailed
from trainyard.models.gpt.model import GPTModel

MICROBATCHES = SMALL["global_batch_size"]


def train(tokens: str, save: Path, **options: Any) -> dict[str, Any]:
    validating = {"split": "100,0,0", "eval_iters": 0, "rerun_mode": "validate_results"}
    paths = {"data_path": [tokens], "save": str(save)}
    return run_directly(PretrainConfig, run, **{**SMALL, **validating, **paths, **options})


def break_step(monkeypatch: pytest.MonkeyPatch, step: int, times: int) -> None:
    """Make the first micro-batch of a step come to nothing, the first `times` that it is run."""
    calls, forward = [0], GPTModel.forward_step

    def broken(self: GPTModel, hidden: Tensor | None, batch: Any) -> Tensor:
        output = forward(self, hidden, batch)
        first = MICROBATCHES * (step - 1)
        place, run_number = (calls[0] - first) % MICROBATCHES, (calls[0] - first) // MICROBATCHES
        calls[0] += 1
        return output * math.nan if place == 0 and 0 <= run_number < times else output

    monkeypatch.setattr(GPTModel, "forward_step", broken)


@pytest.mark.slow
def test_a_faulty_machine_is_found_by_a_rerun_elsewhere(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(tokens, tmp_path / "sound")
    save = tmp_path / "run"
    with monkeypatch.context() as patch:
        break_step(patch, step=4, times=2)
        with pytest.raises(RerunElsewhere, match=r"step 4: .* both times"):
            train(tokens, save)
    assert (save / "iter_0000003" / "manifest.json").exists()
    with monkeypatch.context() as patch:
        break_step(patch, step=1, times=1)  # it begins at step 4, on the same machine
        with pytest.raises(RerunElsewhere, match="some of the same machines"):
            train(tokens, save)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    train(tokens, save)
    assert "one of those machines is faulty; continuing without them" in caplog.text
    assert ledger(tmp_path / "sound") == ledger(save)


def test_the_same_result_on_every_machine_is_blamed_on_the_model(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_step(patch, step=2, times=2)
        with pytest.raises(RerunElsewhere):
            train(tokens, tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    break_step(monkeypatch, step=1, times=1)
    with pytest.raises(ValidationFailed, match="the cause is the model or its data"):
        train(tokens, tmp_path)


def test_a_transient_fault_ends_the_run_and_the_same_command_resumes(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_step(patch, step=3, times=1)
        with pytest.raises(ValidationFailed, match="transient fault"):
            train(tokens, tmp_path)
    assert train(tokens, tmp_path)["steps"] == 6
