"""A flow that is stopped or killed leaves nothing running and loses no finished work."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.yard.yard import COLLECTED, Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300)]

LONG = COLLECTED.replace("train_iters = 6", "train_iters = 100000\nlog_interval = 10")
START_SECONDS = 120
STOP_SECONDS = 30


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory, module_cache: str) -> Yard:
    return Yard(tmp_path_factory.mktemp("stopping"), {"TRAINYARD_CACHE": module_cache})


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Path]:
    """File for what a flow says; shown when the test fails."""
    file = tmp_path / "console.txt"
    file.touch()
    yield file
    print(file.read_text())


def stop_in_training(yard: Yard, console: Path, number: signal.Signals) -> int:
    """Start a flow without a server, send it a signal in the middle of training; exit status."""
    command = ("-m", "flows.pretrain_gpt", "--verbose", yard.recipe(LONG))
    with console.open("w") as stderr, yard.start(*command, stderr=stderr) as process:
        deadline = time.monotonic() + START_SECONDS
        while "iteration " not in console.read_text() and time.monotonic() < deadline:
            assert process.poll() is None, "it ended before the training began"
            time.sleep(0.1)
        programs = " ".join(yard.processes())
        assert "stages.pretrain" in programs
        assert "flows.server.ephemeral" in programs
        process.send_signal(number)
        try:
            return process.wait(STOP_SECONDS)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGTERM, 143, id="SIGTERM"),
        pytest.param(signal.SIGINT, 130, id="SIGINT", marks=pytest.mark.full),
    ],
)
def test_stopped_flow_saves(yard: Yard, console: Path, number: signal.Signals, status: int) -> None:
    assert stop_in_training(yard, console, number) == status
    assert yard.wait_until_empty(5) == []
    output = console.read_text()
    assert "saved step" in output
    last = output.splitlines()[-1]
    saved = rf"stopped by {number.name}; pretrain saved step [\d,]+; run the same command to resume"
    assert re.fullmatch(saved, last), last
    assert "Traceback" not in output


def test_a_flow_that_is_killed_leaves_nothing(yard: Yard, console: Path) -> None:
    assert stop_in_training(yard, console, signal.SIGKILL) == -signal.SIGKILL
    assert yard.wait_until_empty(STOP_SECONDS) == []
