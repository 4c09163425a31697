"""Whether a process is still alive. Linux only; elsewhere every process counts as alive."""

from __future__ import annotations

import hashlib
import os
import uuid
from functools import lru_cache
from pathlib import Path
from typing import Literal


@lru_cache
def boot_mark() -> str:
    """The boot of this machine: alike in all its containers, and on no other machine. Raises
    OSError."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine_mark(namespace: Literal["pid", "net"] = "pid") -> str:
    """The boot and a namespace: with equal marks, process ids can be compared, or processes reach
    each other's abstract sockets."""
    try:
        boot = boot_mark()
        space = os.stat(f"/proc/self/ns/{namespace}").st_ino
    except OSError:
        return uuid.uuid4().hex[:12]  # equal to no other, so every process counts as alive
    return hashlib.sha256(f"{boot}/{space}".encode()).hexdigest()[:12]


def started(pid: int) -> str:
    """Start of a process in clock ticks since boot, which differs when an id is reused; "gone" for
    a dead process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    fields = stat.rpartition(")")[2].split()
    return "gone" if fields[0] in "ZX" else fields[19]
