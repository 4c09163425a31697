"""What torch's gloo needs of us: a worker a group, one device, and a wait before the process ends.

One worker: torch 2.13 gives each gloo group two worker threads, and both write the name of the
collective that they finished to one string, without a lock. Where a name is too long for the string
itself (ALLGATHER_COALESCED), that corrupts the heap, seldom and anywhere: "malloc(): unaligned
tcache chunk detected", a segmentation fault. The collectives of a group run in their order anyway.

One device: torch makes one for each group, whose thread wakes 100 times a second. Forty groups, as
many as a rank has with four kinds of parallelism, took 3 % of a core in each rank that waits.

The wait: these threads take the GIL when they release the tensors of a finished collective,
possibly late on a busy machine. During interpreter shutdown that aborts the process. If a group
outlives training, because a kept model refers to it, only this module waits for its threads."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed

log = logging.getLogger(__name__)

THREAD = "pt_gloo_runloop"
"""Name that torch gives the workers."""
LOOKS = 5
"""Looks in a row at which all must sleep: one that waits for the GIL sleeps, too, until this thread
releases it between two looks."""
PAUSE_SECONDS = 0.002
MOST_SECONDS = 10.0


@cache
def one_worker_per_group() -> None:
    """Have torch create gloo groups with one worker and the same device from now on, as its Python
    interface has no option for it. Call it before the first group."""
    if not torch.distributed.is_gloo_available():
        return
    backend: Any = torch.distributed.ProcessGroupGloo
    original = backend.__init__

    def create(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        *options_given: Any,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if options_given:
            original(self, store, rank, size, *options_given)
            return
        options = backend._Options()
        options._threads = 1
        options._timeout = timeout
        options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME"))
        original(self, store, rank, size, options)

    backend.__init__ = create


@cache
def _devices(interfaces: str | None) -> list[Any]:
    backend: Any = torch.distributed.ProcessGroupGloo
    if not interfaces:
        return [backend.create_default_device()]
    names = interfaces.removesuffix(",").split(",")
    return [backend.create_device(interface=name) for name in names]


def wait_for_gloo(most_seconds: float = MOST_SECONDS) -> None:
    """Until gloo's threads have nothing to do; after the last collective. Where there is no /proc
    nothing is known of them."""
    deadline = time.monotonic() + most_seconds
    quiet = 0
    while quiet < LOOKS:
        if time.monotonic() > deadline:
            log.warning("gloo's threads were still at work %.0f s after the last use", most_seconds)
            return
        time.sleep(PAUSE_SECONDS)
        states = _states()
        if not states:
            return
        quiet = quiet + 1 if all(state == "S" for state in states) else 0


def _states() -> list[str]:
    """States of gloo's threads, as in /proc: R running or about to, S asleep."""
    found = []
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended
            continue
        if name == THREAD:
            found.append(rest.split()[0])
    return found
