"""A run without a step to resume from: warnings and refusals."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.training.test_pretrain_api import options
from trainyard.errors import ArtifactError, ConfigError
from trainyard.training.run.resume_checks import refuse_lost_steps
from trainyard.training.run.run_steps import FoundSteps


def test_a_first_start_with_load_equal_to_save_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save = tmp_path / "run"
    with caplog.at_level(logging.WARNING):
        refuse_lost_steps(options(save, load=f"{save}/"), FoundSteps())
    assert "holds no checkpoint yet: starting from initial weights" in caplog.text


def test_without_load_no_warning_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_lost_steps(options(tmp_path / "run"), FoundSteps())
    refuse_lost_steps(options(tmp_path / "run", load=str(tmp_path / "other")), FoundSteps())
    assert caplog.text == ""


@pytest.mark.parametrize(
    "asks",
    [{"finetune": True}, {"exit_on_missing_checkpoint": True}],
    ids=lambda asks: next(iter(asks)),
)
def test_options_that_need_a_checkpoint_refuse_an_empty_folder(
    tmp_path: Path, asks: dict[str, Any]
) -> None:
    save = tmp_path / "run"
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        refuse_lost_steps(options(save, load=str(save), **asks), FoundSteps())


@pytest.mark.parametrize("load", [None, "same", "other"])
def test_a_run_without_a_whole_step_does_not_start_over(tmp_path: Path, load: str | None) -> None:
    save = tmp_path / "run"
    places = {"same": str(save), "other": str(tmp_path / "other"), None: None}
    with pytest.raises(ArtifactError, match="no step of this run is whole"):
        refuse_lost_steps(options(save, load=places[load]), FoundSteps(damaged=(2, 4)))


def test_load_equal_to_save_refuses_steps_of_other_options(tmp_path: Path) -> None:
    save = tmp_path / "run"
    given = options(save, load=str(save))
    with pytest.raises(ConfigError, match="means to resume from the steps there, and --new-run"):
        refuse_lost_steps(given, FoundSteps(foreign=(2,)))
    refuse_lost_steps(replace(given, load=None), FoundSteps(foreign=(2,)))
