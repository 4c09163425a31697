"""A run without --save: it trains and reports, and keeps nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.stages.pretrain_runs import flags
from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import RUN, Death, Died, go, ledger
from trainyard.config import from_dict
from trainyard.errors import ConfigError
from trainyard.testing.kill import Zygote
from trainyard.training.loop.events import Callback
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.pretrain import pretrain
from trainyard.training.result import Result


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return write_pair(tmp_path / "t", [60] * 60)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def unsaved(tokens: str, *callbacks: Callback, **changed: Any) -> Result:
    config = from_dict(PretrainConfig, {**RUN, "data_path": [tokens], **changed})
    return pretrain(None, None, config, callbacks=callbacks)


@pytest.mark.slow
def test_it_trains_as_with_save_and_keeps_nothing(
    tokens: str, tmp_path: Path, empty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result = unsaved(tokens, save_interval=2)
    assert "no --save: this run keeps nothing, and cannot resume" in caplog.text
    assert go(tokens, tmp_path / "run") == "finished"
    assert result.outcome == "finished"
    assert result.ledger == ledger(tmp_path / "run")
    assert result.metrics["validation_loss"] == result.ledger[-1]["validation_loss"]
    assert list(empty.iterdir()) == []
    resumed = unsaved(tokens, load=str(tmp_path / "run"), lr_decay_iters=6, train_iters=7)
    assert [line["step"] for line in resumed.ledger] == [7]


@pytest.mark.slow
def test_a_stop_says_what_is_lost(tokens: str, caplog: pytest.LogCaptureFixture) -> None:
    assert unsaved(tokens, exit_interval=2).outcome == "paused"
    assert "stopped after step 2 (--exit-interval); without --save it is lost" in caplog.text
    with pytest.raises(Died):
        unsaved(tokens, Death(2))


@pytest.mark.parametrize(
    "asked",
    [
        {"save_performance_summary": True},
        {"log_progress": True},
        {"new_run": True},
        {"non_persistent_save_interval": 2, "non_persistent_ckpt_type": "global"},
    ],
)
def test_what_is_kept_in_the_run_folder_is_refused(tokens: str, asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs --save, the folder of the run"):
        unsaved(tokens, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command_reports_the_losses(tokens: str, empty: Path, ranks: int) -> None:
    line = flags({**RUN, "data_path": tokens, "nproc_per_node": ranks})
    with Zygote("stages.pretrain.run") as zygote:
        status, _, log = zygote.run("stages.pretrain", line)
        assert status == 0, log
        assert "finished, nothing is kept: {" in log
        assert "'steps': 6, " in log
        stopped, _, log = zygote.run("stages.pretrain", [*line, "--exit-interval", "2"])
    assert stopped == 143
    assert "run the same command to resume" not in log
    assert list(empty.iterdir()) == []
