"""A worker that is told to stop: what it has started is told first."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from flows.worker import below, is_alive, stop_all

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


def test_what_it_started_has_saved_when_it_ends(tmp_path: Path) -> None:
    said = tmp_path / "said"
    command = [sys.executable, "-c", WORKER, STAGE, str(said)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        try:
            while not said.exists() or not said.read_text():
                time.sleep(0.02)
            (flow,) = below(worker.pid)
            assert is_alive(flow)
            stop_all(worker.pid)
            assert said.read_text() == "up saved "
            assert not is_alive(flow)
            assert is_alive(worker.pid)  # it is told last
        finally:
            worker.kill()
