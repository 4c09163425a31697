"""A gloo group has one worker and no device of its own; the end waits for busy workers alone."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from blake3 import blake3

from trainyard.parallel.gloo import THREAD, _states, wait_for_gloo
from trainyard.testing.pool import RankPool

SET_NAME = 15  # prctl's PR_SET_NAME
DEVICE_THREAD = "gloo_tcp_loop"


def gloo_like(busy_seconds: float, over: threading.Event) -> threading.Thread:
    """A thread of that name, which computes for a while without Python's lock and then sleeps."""
    named = threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(SET_NAME, THREAD.encode())
        named.set()
        data, deadline = bytes(4 << 20), time.monotonic() + busy_seconds
        while time.monotonic() < deadline:
            blake3(data)
        over.wait()

    thread = threading.Thread(target=run)
    thread.start()
    named.wait()
    return thread


def new_threads() -> tuple[int, int]:
    """Workers of a new group, and threads of devices in all."""
    dist: Any = torch.distributed
    dist.barrier()
    before = len(_states())
    group = dist.new_group([0, 1])
    for work in [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(9)]:
        work.wait()  # a worker has its name once it runs
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return len(_states()) - before, names.count(DEVICE_THREAD)


@pytest.mark.distributed
def test_a_group_has_one_worker_and_shares_the_device(ranks: RankPool) -> None:
    """With two workers, torch corrupts the heap now and then; devices wake all the time."""
    assert ranks.run(new_threads, 2) == [(1, 1), (1, 1)]


@pytest.mark.slow
def test_it_waits_until_they_sleep() -> None:
    over = threading.Event()
    began = time.monotonic()
    threads = [gloo_like(seconds, over) for seconds in (0.4, 0.0)]
    try:
        wait_for_gloo()
        assert 0.39 < time.monotonic() - began < 5.0
        began = time.monotonic()
        wait_for_gloo()
        assert time.monotonic() - began < 1.0
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_it_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()
    thread = gloo_like(1.0, over)
    try:
        wait_for_gloo(0.05)
        assert "still at work" in caplog.text
    finally:
        over.set()
        thread.join()


def test_without_such_threads_it_returns_at_once() -> None:
    began = time.monotonic()
    wait_for_gloo()
    assert time.monotonic() - began < 0.5
