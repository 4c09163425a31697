"""A flow that is stopped or killed leaves nothing running and loses no finished work."""

from __future__ import annotations

import signal
import subprocess

import pytest

from .conftest import COLLECTED, Yard, interrupt

pytestmark = [pytest.mark.yard, pytest.mark.timeout(900)]

LONG = COLLECTED.replace("train_iters = 6", "train_iters = 100000\nlog_interval = 10")


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory, module_cache: str) -> Yard:
    return Yard(tmp_path_factory.mktemp("stopping"), {"TRAINYARD_CACHE": module_cache})


def start_and_wait_for_training(yard: Yard) -> subprocess.Popen[str]:
    """A flow, without a server, whose training has begun."""
    process = yard.start("-m", "flows.pretrain_gpt", "--verbose", yard.recipe(LONG))
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "pretrain" in line and "iteration " in line:
            break
    assert process.poll() is None, "".join(seen)
    programs = " ".join(yard.processes())
    assert "stages.pretrain" in programs
    assert "flows.local_api" in programs
    return process


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_flow_that_is_stopped_saves_and_leaves_nothing(
    yard: Yard, number: signal.Signals, status: int
) -> None:
    with start_and_wait_for_training(yard) as process:
        code, err = interrupt(process, number)
    assert code == status, err
    assert yard.wait_until_empty(5) == []
    assert "stopped" in err
    assert "Traceback" not in err
    assert list((yard.tiny / "checkpoint").glob("iter_*/manifest.json")), "training saved nothing"


def test_a_flow_that_is_killed_leaves_nothing(yard: Yard) -> None:
    with start_and_wait_for_training(yard) as process:
        interrupt(process, signal.SIGKILL)
    assert yard.wait_until_empty(30) == []
