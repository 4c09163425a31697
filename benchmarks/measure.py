"""Times of whole commands: wall, processor, and the peak memory of the process tree.

A figure is the median of several runs, ours and the peer's in turn, so that a machine whose speed
drifts slows both. The first run of each is not counted: it brings the files into the page cache."""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.02
PAUSE = 20
"""Times what a sample takes: gigabytes of mapped files take milliseconds, and the process measured
should have the processor."""

KCMP = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine)
"""Number of the call that compares what two processes have, of which the C library has no name."""
KCMP_VM = 1
LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a command."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    """Largest sum, over time, of the memory of the process and all its children, shared pages
    counted once (PSS)."""
    output: str


@dataclass(frozen=True, slots=True)
class Figure:
    """Several runs of a command."""

    runs: tuple[Run, ...]

    @property
    def wall_seconds(self) -> float:
        """Median."""
        return statistics.median(run.wall_seconds for run in self.runs)

    @property
    def cpu_seconds(self) -> float:
        """Median."""
        return statistics.median(run.cpu_seconds for run in self.runs)

    @property
    def peak_mb(self) -> float:
        """The largest of all runs, in 10^6 bytes."""
        return max(run.peak_bytes for run in self.runs) / 1e6

    @property
    def spread(self) -> str:
        """Fastest to slowest."""
        walls = [run.wall_seconds for run in self.runs]
        return f"{min(walls):.2f}-{max(walls):.2f}"


Prepare = Callable[[], Sequence[str]]
"""Makes ready what a run needs, outside its time, and says which command to run."""


def measure(prepares: dict[str, Prepare], runs: int, warm_up: int = 1) -> dict[str, Figure]:
    """Run every command in turn, `runs` times after the warm-up; RuntimeError when one fails."""
    found: dict[str, list[Run]] = {name: [] for name in prepares}
    for number in range(warm_up + runs):
        for name, prepare in prepares.items():
            run = run_once(prepare())
            if number >= warm_up:
                found[name].append(run)
    return {name: Figure(tuple(each)) for name, each in found.items()}


def run_once(command: Sequence[str], environment: dict[str, str] | None = None) -> Run:
    """Run a command to its end. RuntimeError, with what it printed, when it fails."""
    began = time.perf_counter()
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
    )
    watch = _Watch(process.pid)
    watch.start()
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    watch.stop()
    text = output.decode(errors="replace")
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {process.returncode}\n{text}")
    # Not ru_maxrss, which is never less than what the process that started this one held then.
    return Run(wall, usage.ru_utime + usage.ru_stime, watch.peak_bytes, text)


class _Watch(threading.Thread):
    """Samples the memory of a process and all below it."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._over = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        took = 0.0
        while not self._over.wait(max(SAMPLE_SECONDS, PAUSE * took)):
            began = time.thread_time()
            together = sum(map(_pss_bytes, _tree(self._pid)))
            # Between two samples, at least the process itself may have held more.
            alone = _kilobytes(Path(f"/proc/{self._pid}/status"), "VmHWM:") * 1024
            self.peak_bytes = max(self.peak_bytes, together, alone)
            took = time.thread_time() - began

    def stop(self) -> None:
        self._over.set()
        self.join()


def _tree(pid: int) -> list[int]:
    """The processes that have memory of their own."""
    found, queue = [], [pid]
    while queue:
        process = queue.pop()
        found.append(process)
        queue += [child for child in _children(process) if not _is_vforked(child, process)]
    return found


def _children(process: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # the process ended meanwhile
        for thread in Path(f"/proc/{process}/task").glob("*/children"):
            with suppress(OSError):  # or this thread
                found += map(int, thread.read_text().split())
    return found


def _is_vforked(pid: int, parent: int) -> bool:
    """Whether a process still has the very memory of its parent.

    Python starts programs by vfork: until the new one begins, the child runs in the pages of its
    parent, which PSS does not divide, since they are mapped once. On a busy machine that lasts, and
    a sample taken then sees twice what there is. kcmp(2) detects it; where that is missing (another
    architecture, a kernel without it) such a sample counts double."""
    if KCMP is None:
        return False
    return bool(LIBC.syscall(KCMP, pid, parent, KCMP_VM, 0, 0) == 0)


def _pss_bytes(pid: int) -> int:
    return _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") * 1024


def _kilobytes(path: Path, name: str) -> int:
    """A figure that the kernel reports of a process; 0 once it has ended."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    except OSError:
        return 0
    return 0
