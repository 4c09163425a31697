"""A Prefect worker for a container, which stops its flow runs before the container ends.

    python -m flows.worker [--leave-jobs] --pool NAME ...    the options of `prefect worker start`

Prefect's own worker signals its flow runs when it stops, but does not wait long for them. Then the
container ends and kills them before stages save and the server learns of it. This worker first
signals its flow runs and waits for them. Stages save, and the server marks the runs as crashed, so
that they may restart.

--leave-jobs is for a yard whose stages are jobs of a cluster. There a signal would stop a training
only because its worker is replaced. So the worker kills its flows without a signal. Their jobs run
on, the server restarts the silent runs, and these find their jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

LEAVE = "--leave-jobs"
TICK_SECONDS = 0.2
PROCESSES = Path("/proc")


def main() -> int:
    """Run the worker to its end; returns its exit status."""
    stopping = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    options = [word for word in sys.argv[1:] if word != LEAVE]
    command = [sys.executable, "-m", "flows.worker.prefect_worker", *options]
    # Its own session: signals to our process group must not reach it.
    with subprocess.Popen(command, start_new_session=True) as worker:
        while worker.poll() is None and not stopping.wait(TICK_SECONDS):
            pass
        if stopping.is_set() and LEAVE in sys.argv:
            kill_all(worker.pid)
            return 0
        if stopping.is_set():
            stop_all(worker.pid)
            worker.terminate()
        return worker.wait()


def stop_all(worker: int) -> None:
    """Send SIGTERM once to each descendant of a process, until none runs.

    It has no time limit: the container engine kills after its own grace."""
    signalled: set[int] = set()
    while running := below(worker) | {pid for pid in signalled if is_alive(pid)}:
        for pid in running - signalled:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        signalled |= running
        time.sleep(TICK_SECONDS)


def kill_all(worker: int) -> None:
    """Kill a worker and its descendants, as a loss of power would."""
    for pid in (worker, *below(worker)):  # the worker first: it would report the end of its flows
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def below(root: int) -> set[int]:
    """The descendants of a process."""
    parents = dict(_parents(path for path in PROCESSES.iterdir() if path.name.isdecimal()))
    found: set[int] = set()
    level = {root}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found |= level
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return bool(list(_parents([PROCESSES / str(pid)])))


def _parents(folders: Iterable[Path]) -> Iterable[tuple[int, int]]:
    for folder in folders:
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                yield int(folder.name), int(parent)
