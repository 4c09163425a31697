"""Checks of the machine of the stages: disks, shared memory, limits, encodings, GPUs.

They judge the report of `trainyard.machine`: of the stages' machine if ranks ran, else of this
one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flows.doctor.check import Check, CheckResult, State, fail, ok, skipped, warn
from flows.doctor.context import YardContext
from flows.yard.profile import CONTAINED
from trainyard.artifacts.by_version import cache_folder
from trainyard.artifacts.urls import local_path
from trainyard.errors import ConfigError, InfrastructureError
from trainyard.machine import Machine

GIB = 2**30
MIB = 2**20

DISK_WARNED, DISK_REFUSED = 10 * GIB, 1 * GIB
INODES_REFUSED = 1000

SHARED_WARNED, SHARED_REFUSED = 1 * GIB, 128 * MIB
"""Ranks of a node communicate through it, and data loaders pass batches in it. A container gets
64 MiB by default."""

FILES_WARNED, FILES_REFUSED = 4096, 1024
"""For mapped shards of a corpus, connections of ranks and of the store, pipes of workers."""

LOCKED_REFUSED = 1 * GIB
INFINIBAND = Path("/sys/class/infiniband")
DOCKER = Path("/.dockerenv")


def disk(yard: YardContext) -> CheckResult:
    """Free space for output, run folders, scratch and cached digests."""
    found = []
    states = [State.OK]
    for what, folder in folders(yard):
        free, inodes, fault = room(folder)
        found.append(f"{what} {folder}: {fault or size(free)}")
        if fault or free < DISK_REFUSED or inodes < INODES_REFUSED:
            states.append(State.FAIL)
            found[-1] += "" if inodes >= INODES_REFUSED or fault else f", {inodes} files more"
        elif free < DISK_WARNED:
            states.append(State.WARN)
    message = "; ".join(found)
    todo = "free some: `python -m flows.gc` lists what is no longer needed, `--remove` removes it"
    if State.FAIL in states:
        return fail(InfrastructureError, message, todo)
    return warn(message, todo) if State.WARN in states else ok(message)


def is_contained() -> bool:
    """Whether doctor runs in a container, whose /tmp is not that of the stages."""
    return DOCKER.exists() or "KUBERNETES_SERVICE_HOST" in os.environ


def folders(yard: YardContext) -> list[tuple[str, Path]]:
    """The folders of this machine that a run writes to, one per file system."""
    root = local_path(yard.root) if yard.has_local_store else None
    wanted = {} if root is None else {"yard": root}
    wanted["runs"] = Path(yard.site.run_folder)
    if not (yard.site.backend in CONTAINED and is_contained()):
        wanted |= {"scratch": Path(tempfile.gettempdir()), "cache": cache_folder()}
    return _by_file_system(wanted)


def _by_file_system(wanted: Mapping[str, Path]) -> list[tuple[str, Path]]:
    """The first folder on each file system; for a missing one, its nearest parent."""
    found: dict[int, tuple[str, Path]] = {}
    for what, path in wanted.items():
        there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        found.setdefault(there.stat().st_dev, (what, there))
    return list(found.values())


def room(folder: Path) -> tuple[int, int, str]:
    """Free bytes, free inodes, and why the folder cannot be written; empty if it can."""
    free = shutil.disk_usage(folder).free
    stat = os.statvfs(folder)
    inodes = stat.f_favail if stat.f_files else INODES_REFUSED  # btrfs counts none
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * MIB)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return free, inodes, f"cannot be written to ({error.strerror})"
    return free, inodes, ""


def shared_memory(yard: YardContext) -> CheckResult:
    """/dev/shm as a stage sees it."""
    if yard.site.backend in CONTAINED and yard.there is None:
        configured_size = yard.site.options_of("pretrain").shared_memory
        return skipped(f"{configured_size} in a container of training; {who_reports(yard)}")
    machine, where = seen(yard)
    free = machine.shared_memory_bytes
    if free is None:
        return warn(f"no /dev/shm{where}", "mount a tmpfs there; NCCL needs it")
    message = f"{size(free)} free in /dev/shm{where}"
    todo = (
        f"raise shared_memory in the yard's [{yard.site.backend}]"
        if yard.site.backend in CONTAINED
        else "mount -o remount,size=16g /dev/shm; in a container --shm-size=16g"
    )
    if free < SHARED_REFUSED:
        return fail(ConfigError, f"{message}, ranks of one node need at least 128 MiB", todo)
    return warn(message, todo) if free < SHARED_WARNED else ok(message)


def limits(yard: YardContext) -> CheckResult:
    """The limits of open files and, with InfiniBand, of locked memory."""
    machine, where = seen(yard)
    files, locked = machine.open_files, machine.locked_memory_bytes
    message = f"nofile {count(files)}, memlock {count(locked, MIB, ' MiB')}{where}"
    todo = (
        "ulimit -n 65536 before the worker starts (systemd: LimitNOFILE, Slurm: in slurmd's unit)"
    )
    if 0 <= files < FILES_REFUSED:
        return fail(ConfigError, f"{message}: a corpus of many shards needs more open files", todo)
    has_infiniband = INFINIBAND.is_dir() and any(INFINIBAND.iterdir())
    if has_infiniband and 0 <= locked < LOCKED_REFUSED:
        return fail(
            ConfigError,
            f"{message}: InfiniBand locks the memory that it sends",
            "ulimit -l unlimited before the worker starts (LimitMEMLOCK=infinity), and for Slurm "
            "PropagateResourceLimitsExcept=MEMLOCK",
        )
    return warn(message, todo) if 0 <= files < FILES_WARNED else ok(message)


def text(yard: YardContext) -> CheckResult:
    """Python and the programs that it starts use UTF-8."""
    machine, where = seen(yard)
    message = f"locale {machine.locale or 'not set'}, Python {'/'.join(machine.encodings)}{where}"
    todo = "export LC_ALL=C.UTF-8, and unset PYTHONUTF8 and PYTHONIOENCODING"
    wrong = [name for name in machine.encodings if _plain(name) not in ("utf8", "")]
    if wrong:
        return fail(ConfigError, f"{message}: non-ASCII text would be corrupted", todo)
    if "utf8" not in _plain(machine.locale):
        return warn(f"{message}: other programs treat text as ASCII", todo)
    return ok(message)


def gpus(yard: YardContext) -> CheckResult:
    """A node has as many GPUs as a stage requests, all of one kind."""
    wanted = yard.num_gpus
    if not yard.runs_here and yard.there is None:
        asked = f"{wanted} GPUs a node" if wanted else "no GPU"
        return skipped(f"stages request {asked} on another machine; {who_reports(yard)}")
    machine, where = seen(yard)
    found = machine.gpus
    if not found:
        if not wanted:
            return skipped(f"no stage requests one ({machine.gpu_fault or 'and none was found'})")
        return fail(
            InfrastructureError,
            f"stages request {wanted} GPUs, and none is visible{where}: {machine.gpu_fault}",
            "install the driver, or in a container the NVIDIA container toolkit; dmesg | grep -i "
            "nvrm shows a device that was lost",
        )
    kinds = sorted({f"{gpu.name}, {size(gpu.memory_bytes)}" for gpu in found})
    message = f"{len(found)} x {' / '.join(kinds)}, driver {found[0].driver}{where}"
    if len(found) < wanted:
        return fail(
            InfrastructureError,
            f"stages request {wanted} GPUs: {message}",
            "correct [resources] of the yard, or look for the lost device: nvidia-smi, dmesg",
        )
    return warn(message, "ranks wait for the slowest") if len(kinds) > 1 else ok(message)


def who_reports(yard: YardContext) -> str:
    """How to get a report of the stages' machine, which is not this one."""
    is_tried = yard.site.backend == "container"
    return "the check of ranks reports it" if is_tried else "--submit runs a job that reports it"


def seen(yard: YardContext) -> tuple[Machine, str]:
    """The machine to judge, and a phrase that names it if the stages do not run here."""
    if yard.there is not None:
        return yard.there, "" if yard.runs_here else f" on {yard.there.host}"
    return yard.here, "" if yard.runs_here else " on this machine, not the stages'"


def size(value: int) -> str:
    """Bytes, for people."""
    return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value // MIB} MiB"


def count(value: int, unit: int = 1, name: str = "") -> str:
    """A limit, for people."""
    return "unlimited" if value < 0 else f"{value // unit}{name}"


def _plain(encoding: str) -> str:
    return encoding.lower().replace("-", "").replace("_", "")


CHECKS = (
    Check("disk", disk, "disk-full"),
    Check("shared memory", shared_memory, "shared-memory"),
    Check("limits", limits, "limits"),
    Check("text", text, "text-and-locale"),
    Check("GPUs", gpus, "gpus-and-their-driver"),
)
