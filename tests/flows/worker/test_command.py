"""A worker that stops ends its flows first, or leaves their jobs alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.worker.command import below, is_alive, kill_all, stop_all

STAGE = """
import signal, sys, time
def stop(number, frame):
    time.sleep(0.3)
    open(sys.argv[1], "a").write("saved ")
    raise SystemExit(0)
signal.signal(signal.SIGTERM, stop)
open(sys.argv[1], "w").write("up ")
time.sleep(60)
"""
WORKER = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], start_new_session=True).wait()
signal.pause()
"""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def worker(output: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", WORKER, STAGE, str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        try:
            while not output.exists() or not output.read_text():
                time.sleep(0.02)
            yield worker
        finally:
            worker.kill()


@pytest.mark.slow
def test_flows_stop_before_the_worker(output: Path, worker: subprocess.Popen[bytes]) -> None:
    (flow,) = below(worker.pid)
    assert is_alive(flow)
    stop_all(worker.pid)
    assert output.read_text() == "up saved "
    assert not is_alive(flow)
    assert is_alive(worker.pid)  # it is signalled last


def test_with_leave_jobs_flows_get_no_signal(
    output: Path, worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (flow,) = below(worker.pid)
    killed, kill = [], os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: (killed.append(pid), kill(pid, number)))
    kill_all(worker.pid)
    assert killed == [worker.pid, flow]  # or it would tell the server of a flow that ended
    assert worker.wait(10) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while is_alive(flow):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert output.read_text() == "up "
