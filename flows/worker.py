"""A worker in a container, where its end is the end of all that runs beside it.

    python -m flows.worker [--leave-jobs] --pool NAME ...    the options of `prefect worker start`

Prefect's own, told to stop, tells its flow runs, and does not wait for them for long. In a
container what still runs then is killed, without a word to its stages or to the server. So they are
told first and waited for: stages save, and the server hears that the runs have crashed and may
begin again.

--leave-jobs is for a yard whose stages are jobs of a cluster: there a flow that is told to stop
would end its training, for the sake of a worker that is replaced. So nobody is told anything. The
jobs go on, the server misses the runs and starts them again, and they find their jobs."""

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
    told = threading.Event()

    def tell(_number: int, _frame: FrameType | None) -> None:
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    options = [word for word in sys.argv[1:] if word != LEAVE]
    command = [sys.executable, "-m", "prefect", "worker", "start", *options]
    # A session of its own: what is sent to our process group is not for it.
    with subprocess.Popen(command, start_new_session=True) as worker:
        while worker.poll() is None and not told.wait(TICK_SECONDS):
            pass
        if told.is_set() and LEAVE in sys.argv:
            kill_all(worker.pid)
            return 0
        if told.is_set():
            stop_all(worker.pid)
            worker.terminate()
        return worker.wait()


def stop_all(worker: int) -> None:
    """Tell what runs below a process to stop, once each, until nothing does.

    For how long is for him to say who told us: an engine kills after its own grace."""
    told: set[int] = set()
    while running := below(worker) | {pid for pid in told if is_alive(pid)}:
        for pid in running - told:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        told |= running
        time.sleep(TICK_SECONDS)


def kill_all(worker: int) -> None:
    """End a worker and what it has started, as a loss of power would."""
    for pid in (worker, *below(worker)):  # it first: it would tell the server of flows that ended
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def below(root: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    parents = dict(_parents(path for path in PROCESSES.iterdir() if path.name.isdecimal()))
    found: set[int] = set()
    level = {root}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found |= level
    return found


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and that nobody waited for does not."""
    return bool(list(_parents([PROCESSES / str(pid)])))


def _parents(folders: Iterable[Path]) -> Iterable[tuple[int, int]]:
    for folder in folders:
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                yield int(folder.name), int(parent)


if __name__ == "__main__":
    sys.exit(main())
