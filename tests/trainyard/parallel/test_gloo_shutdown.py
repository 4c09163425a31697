"""The end waits for threads that still work, and for nothing else."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
from blake3 import blake3

from trainyard.parallel.gloo_shutdown import THREAD, wait_for_gloo

pytestmark = pytest.mark.slow

SET_NAME = 15  # prctl's PR_SET_NAME


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
