"""Two flow runs on one root take turns."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.runner.run_lock import LOCK_FILE, run_lock
from tests.flows.processes import ROOT
from trainyard.artifacts import conditional
from trainyard.errors import InfrastructureError

log = logging.getLogger(__name__)


@pytest.mark.slow
def test_a_second_run_begins_when_the_first_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []

    async def run(name: str) -> None:
        async with run_lock(str(tmp_path), log):
            lines.append(f"{name} begins")
            await asyncio.sleep(0.3)
            lines.append(f"{name} ends")

    async def both() -> None:
        await asyncio.gather(run("one"), run("other"))

    with caplog.at_level("INFO"):
        asyncio.run(both())
    first, second = lines[0].split()[0], lines[2].split()[0]
    assert lines == [f"{first} begins", f"{first} ends", f"{second} begins", f"{second} ends"]
    assert f"another flow run works on {tmp_path}: process {os.getpid()} on" in caplog.text
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.slow
def test_a_slow_store_is_not_taken_for_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(url: str, data: bytes) -> str:
        time.sleep(2.5)
        raise InfrastructureError("the store cannot be reached")

    monkeypatch.setattr(conditional, "put_if_absent", fail)
    with caplog.at_level("INFO"), pytest.raises(InfrastructureError, match="cannot be reached"):
        asyncio.run(_hold(tmp_path, 0.0))
    assert "another flow run" not in caplog.text


def test_other_roots_do_not_wait(tmp_path: Path) -> None:
    async def both() -> None:
        async with run_lock(str(tmp_path / "a"), log), run_lock(str(tmp_path / "b"), log):
            pass

    asyncio.run(asyncio.wait_for(both(), 5))


@pytest.mark.slow
def test_a_run_that_is_cancelled_while_it_waits_leaves_nothing_behind(tmp_path: Path) -> None:
    async def cancelled() -> None:
        async with run_lock(str(tmp_path), log):
            other = asyncio.create_task(_hold(tmp_path))
            await asyncio.sleep(0.1)
            other.cancel()
            with pytest.raises(asyncio.CancelledError):
                await other
        deadline = time.monotonic() + 5
        while (tmp_path / LOCK_FILE).exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    began = time.monotonic()
    asyncio.run(cancelled())
    assert time.monotonic() - began < 10
    time.sleep(1.2)  # the thread that nobody listens to any more gets its turn, and lets it go
    asyncio.run(asyncio.wait_for(_hold(tmp_path, 0.0), 10))


async def _hold(root: Path, seconds: float = 60.0) -> None:
    async with run_lock(str(root), log):
        await asyncio.sleep(seconds)


KILLED = """
import asyncio, logging, os, signal, sys
from flows.runner.run_lock import run_lock

async def main():
    async with run_lock(sys.argv[1], logging.getLogger()):
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_lock_of_a_killed_run_is_taken_over_at_once(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, check=False)
    assert killed.returncode == -9
    assert (tmp_path / LOCK_FILE).exists()
    asyncio.run(asyncio.wait_for(_hold(tmp_path, 0.0), 5))
