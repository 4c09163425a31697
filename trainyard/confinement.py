"""Confines a process that reads a foreign file: no network, no further files, bounded memory and
time. What it prints is read up to a bound.

Uses only the standard library, and knows no format. It is no sandbox for native code: who takes
over such a process still has its user's right to remove files and to signal processes."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import threading
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_NO_NEW_PRIVS = 38
STREAMS = 3
"""File descriptors of a confined process: its input, its output and its errors."""
ROOT = str(Path(__file__).parents[1])


# --- inside -----------------------------------------------------------------------------------


def leave_network() -> str:
    """Move into a network namespace without interfaces, if the system allows it.

    Otherwise sockets still fail, since `confine` allows no further file descriptor. Returns how
    the network is cut off."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for flags in (CLONE_NEWNET, CLONE_NEWUSER | CLONE_NEWNET):
            if library.unshare(flags) == 0:
                return "in a network namespace of its own"
    except (OSError, AttributeError):
        pass
    return "with sockets refused"


def confine(memory_bytes: int, cpu_seconds: int) -> None:
    """Bound memory (address space) and time, and refuse files, sockets and what is written to a
    file, from here on; also new processes and threads, unless the user is root."""
    wanted = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: STREAMS,
    }
    for kind, wanted_limit in wanted.items():
        hard = resource.getrlimit(kind)[1]
        limit = wanted_limit if hard == resource.RLIM_INFINITY else min(wanted_limit, hard)
        try:
            resource.setrlimit(kind, (limit, limit))
        except (OSError, ValueError):
            if kind != resource.RLIMIT_AS:  # some systems do not have this limit
                raise


# --- outside ----------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Only what Python needs to start and find trainyard, and no secrets."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {**kept, "PYTHONPATH": ROOT}


def answer_of(process: subprocess.Popen[bytes], timeout_seconds: float, most_bytes: int) -> bytes:
    """What the process prints, one byte more than `most_bytes` if it is too much. The process has
    ended then; it is killed if it prints too much or takes too long."""
    timer = threading.Timer(timeout_seconds, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        text = process.stdout.read(most_bytes + 1)
        if len(text) > most_bytes:
            process.kill()
        process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.communicate()
    return text


def is_out_of_time(status: int) -> bool:
    """Whether a process ended because of its time: its own limit, or that of `answer_of`."""
    return status in (-signal.SIGXCPU, -signal.SIGKILL)
