"""Stand-ins for stages, and questions about processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGUN_SECONDS = 60.0
"""Until a program that imports Prefect has begun, on a busy machine."""


def python(code: str) -> tuple[str, ...]:
    """The command of a program given as text."""
    return (sys.executable, "-c", code)


def is_running(pid: int) -> bool:
    """True while a process runs; a zombie does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not Path("/proc/self").exists()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """True as soon as the condition holds; False when the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def read_pid(file: Path) -> int:
    """The process id that a program writes to a file."""
    written = wait_until(lambda: file.exists() and file.read_text().endswith("\n"), BEGUN_SECONDS)
    assert written, f"no {file}"
    return int(file.read_text())
