"""How many cores this process may use: the least of the machine's, its affinity and its quota."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")


def available_cores(cgroups: Path = CGROUPS, membership: Path = SELF) -> int:
    """At least 1. A quota of 1.5 cores counts as 2: one worker would leave half a core idle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = [_quota(folder) for folder in _folders(cgroups, membership)]
    limits = [-(-quota // period) for quota, period in filter(None, quotas) if period > 0]
    return max(1, min([cores or 1, *limits]))


def _folders(cgroups: Path, membership: Path) -> list[Path]:
    """The control groups this process is in, and those around them: each may have a quota."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    found = [cgroups, cgroups / "cpu"]  # inside a container its own group looks like the root
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = (cgroups / "cpu" if controllers else cgroups) / path.lstrip("/")
        found += [inner, *(p for p in inner.parents if p.is_relative_to(cgroups))]
    return list(dict.fromkeys(found))


def _quota(folder: Path) -> tuple[int, int] | None:
    """Microseconds of processor time in a period, and the period: cgroup v2, then v1."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return (int(quota), int(period)) if int(quota) > 0 else None
    except (OSError, ValueError):  # none there, or "max": no limit
        return None
