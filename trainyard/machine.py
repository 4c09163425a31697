"""Resources of this process: shared memory, limits, encodings, GPUs.

Standard library only, since every stage runs it. It reports values and checks none."""

from __future__ import annotations

import locale
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainyard.errors import HostMemoryError, InfrastructureError

SHARED_MEMORY = Path("/dev/shm")

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")

QUERY_SECONDS = 10.0
"""nvidia-smi answers in one or two seconds, or never if the driver hangs."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver describes it."""

    name: str
    driver: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Resources of one process."""

    host: str
    python: str
    shared_memory_bytes: int | None
    """Free in /dev/shm; None where there is none."""
    open_files: int
    """ulimit -n, soft; -1: without limit, as for the next two."""
    open_files_hard: int
    locked_memory_bytes: int
    """ulimit -l, soft: InfiniBand registers memory by locking it."""
    locale: str
    """The value of LC_ALL, LC_CTYPE or LANG, for all programs; empty if none is set."""
    encodings: tuple[str, ...]
    """Python's encodings of file names, text and output."""
    gpus: tuple[Gpu, ...]
    gpu_fault: str
    """Why nvidia-smi failed; empty if it did not."""

    def to_document(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @staticmethod
    def from_document(document: dict[str, Any]) -> Machine:
        """The inverse."""
        gpus = tuple(Gpu(**gpu) for gpu in document["gpus"])
        return Machine(**{**document, "gpus": gpus, "encodings": tuple(document["encodings"])})


def inspect_machine() -> Machine:
    """The resources of this process."""
    gpus, fault = _gpus()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        host=platform.node(),
        python=platform.python_version(),
        shared_memory_bytes=_free(SHARED_MEMORY),
        open_files=soft,
        open_files_hard=hard,
        locked_memory_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        locale=next((v for n in ("LC_ALL", "LC_CTYPE", "LANG") if (v := os.environ.get(n))), ""),
        encodings=(
            sys.getfilesystemencoding(),
            locale.getpreferredencoding(False),
            sys.stdout.encoding or "",
        ),
        gpus=gpus,
        gpu_fault=fault,
    )


def available_cores(groups: Path = GROUPS, membership: Path = OWN_GROUPS) -> int:
    """Cores this process may use: the least of the machine's, its affinity and its quota.

    A quota of 1.5 cores counts as 2: one worker would leave half a core idle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [cores or 1]
    for folder, is_old in _control_groups("cpu", groups, membership):
        with suppress(OSError, ValueError):  # "max": no limit
            if is_old:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            if quota > 0 and period > 0:
                found.append(-(-quota // period))
    return max(1, min(found))


def memory_bytes(groups: Path = GROUPS, membership: Path = OWN_GROUPS) -> int:
    """Upper bound of this process's memory: of the machine or its control groups, plus swap."""
    sizes = dict(_sizes_in(Path("/proc/meminfo")))
    whole = sizes.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [whole]
    for folder, is_old in _control_groups("memory", groups, membership):
        file = folder / ("memory.limit_in_bytes" if is_old else "memory.max")
        with suppress(OSError, ValueError):  # "max": no limit
            found.append(int(file.read_text()))
    return min(found) + sizes.get("SwapTotal", 0)


def free_memory_bytes(groups: Path = GROUPS, membership: Path = OWN_GROUPS) -> tuple[int, int]:
    """(memory of the machine that is free, how much of it this process's control groups leave).
    Caches of files count as free. 0 if the kernel does not say."""
    free = dict(_sizes_in(Path("/proc/meminfo"))).get("MemAvailable", 0)
    found = [free]
    for folder, is_old in _control_groups("memory", groups, membership):
        limit, usage = ("limit_in_bytes", "usage_in_bytes") if is_old else ("max", "current")
        prefix = "total_" if is_old else ""
        with suppress(OSError, ValueError):  # "max": no limit
            left = int((folder / f"memory.{limit}").read_text())
            left -= int((folder / f"memory.{usage}").read_text())
            for cache in ("inactive_file", "active_file"):
                left += _count_in(folder / "memory.stat", prefix + cache) or 0
            found.append(max(0, left))
    return free, min(found)


def memory_kills(groups: Path = GROUPS, membership: Path = OWN_GROUPS) -> int:
    """Out-of-memory kills in this process's control group; 0 if the kernel does not say.

    A killed process leaves no message and others only see SIGKILL; a higher count explains it."""
    for folder, is_old in _control_groups("memory", groups, membership):
        file = folder / ("memory.oom_control" if is_old else "memory.events")
        count = _count_in(file, "oom_kill")
        if count is not None:
            return count
    return 0


def death_by_signal(name: str, number: int, kills: int, advice: str) -> InfrastructureError:
    """The error for a process that a signal ended; HostMemoryError if the kernel did, for memory.

    kills: `memory_kills` before it was started. advice: what to do where memory is short."""
    message = f"{name} was killed by {signal.Signals(number).name}"
    if number != signal.SIGKILL:
        return InfrastructureError(message)
    if memory_kills() > kills:
        return HostMemoryError(
            f"{message}, by the kernel: the machine ran out of memory, or the job exceeded its "
            f"memory limit; {advice}"
        )
    return InfrastructureError(
        f"{message}; unless someone sent it, the machine ran out of memory: {advice}"
    )


def _control_groups(controller: str, groups: Path, membership: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of the control groups that bound this process, its own first, then those around it,
    and whether they are of version 1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = groups / controller if controllers else groups
        own = root / path.lstrip("/")  # in a container this may not exist, and the root is its own
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield folder, bool(controllers)


def _sizes_in(path: Path) -> Iterator[tuple[str, int]]:
    """Lines such as `MemTotal:  8000 kB`, in bytes."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, words = line.partition(":")
            if words.endswith(" kB"):
                yield name, int(words.split()[0]) * 1024


def _count_in(path: Path, name: str) -> int | None:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
        return next((int(word[1]) for word in words if len(word) == 2 and word[0] == name), None)
    except (OSError, ValueError):
        return None


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    fields = "--query-gpu=name,driver_version,memory.total"
    try:
        result = subprocess.run(
            ("nvidia-smi", fields, "--format=csv,noheader,nounits"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=QUERY_SECONDS,
        )
    except FileNotFoundError:
        return (), "nvidia-smi is not installed here"
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi does not answer: {error}"
    if result.returncode != 0:
        words = (result.stderr or result.stdout).strip().splitlines()
        return (), f"nvidia-smi: {words[-1] if words else result.returncode}"
    return tuple(_gpu(line) for line in result.stdout.splitlines() if line.count(",") == 2), ""


def _gpu(line: str) -> Gpu:
    name, driver, mebibytes = (word.strip() for word in line.split(","))
    return Gpu(name, driver, int(mebibytes) << 20 if mebibytes.isdigit() else 0)
