"""Programs with options of their own on the command line of a pretraining."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stages.pretrain.program import program, with_more_options
from tests.stages.pretrain_runs import SMALL, flags
from trainyard.config import course, execution
from trainyard.errors import ConfigError
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.pretrain import pretrain

ROOT = Path(__file__).parents[2]
RUN: dict[str, Any] = {**SMALL, "mock_data": True, "dataset_size": 64, "eval_iters": 0}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a test."""

    noise: float = 0.1
    """Part of what the run is."""
    warmth: int = course(3)
    """May change in the middle."""
    colour: str = execution("red")
    """Does not matter."""


def line(save: Path, **changed: Any) -> list[str]:
    return flags({**RUN, "save": save, **changed})


def test_the_program_gets_both_kinds_of_options(tmp_path: Path) -> None:
    found: list[tuple[PretrainConfig, Options]] = []
    argv = line(tmp_path / "run", noise=0.5, colour="blue", train_steps=9, train_iters=None)
    status = program(lambda config, more: found.append((config, more)), Options, argv)
    assert status == 0
    ((config, more),) = found
    assert more == Options(noise=0.5, colour="blue")
    assert config.training.train_iters == 9
    assert config.model.num_layers == RUN["num_layers"]


@pytest.mark.slow
def test_own_options_are_of_the_three_kinds_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(*, expect: int = 0, **changed: Any) -> str:
        def main(config: PretrainConfig, more: Options) -> None:
            pretrain(None, None, config)

        given = {"lr_decay_iters": 6, **changed}
        assert program(main, Options, line(tmp_path / "run", **given)) == expect
        return caplog.text + capfd.readouterr().err

    train()
    train(colour="blue")
    assert "--noise is 0.5 here and 0.1 there" in train(noise=0.5, expect=2)
    train(warmth=4, train_iters=7)
    document = json.loads((tmp_path / "run" / "manifest.json").read_text())
    courses = [segment["course"] for segment in document["run"]["segments"]]
    assert [(c["warmth"], c["train_iters"]) for c in courses] == [(3, 6), (4, 7)]
    assert document["config"]["noise"] == 0.1
    assert "colour" not in document["config"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--noize", "1"], "--noize is not an option: did you mean --noise"),
        (["--noise", "much"], "--noise must be a number"),
        (["--force"], "--force is an option of stages"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert program(lambda config, more: None, Options, [*line(tmp_path), *words]) == 2
    assert message in capfd.readouterr().err


def test_a_field_with_the_name_of_an_option_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice:
        seed: int = 1

    with pytest.raises(ConfigError, match=r"Twice.seed: --seed exists already; rename the field"):
        with_more_options(Twice)
    with pytest.raises(ConfigError, match="more options are a dataclass"):
        with_more_options(int)


@pytest.mark.slow
def test_the_printed_program_trains_and_has_help(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, str(ROOT / "docs/examples/noisy_gpt.py"), *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    printed = run("--help")
    assert "--noise FLOAT" in printed
    assert "Share of the input tokens that are replaced by random ones." in printed
    assert "--num-layers" in printed
    losses = [
        [json.loads(text)["lm_loss"] for text in (tmp_path / name / "ledger.jsonl").open()]
        for name, noise in (("calm", "0"), ("noisy", "0.5"))
        if run(*line(tmp_path / name, noise=noise))
    ]
    assert losses[0] != losses[1]
