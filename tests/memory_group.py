"""Commands that get little memory, by a control group of the kernel's."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 256 << 20


@contextmanager
def little_memory() -> Iterator[list[str]]:
    """In front of a command: it and all that it starts get LIMIT_BYTES together."""
    group = GROUPS / f"trainyard-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError:
        pytest.skip("no memory cgroup of version 1 that we may write to")
    try:
        yield ["sh", "-c", 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"', "sh", str(group)]
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """When the last process has left it: helpers of multiprocessing end after all others."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return group.rmdir()
        except OSError:
            assert time.monotonic() < deadline, f"{group} is still in use"
            time.sleep(0.05)
