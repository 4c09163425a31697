"""Signals that come while the event loop is busy."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest
from prefect.exceptions import TerminationSignal

from flows.runner.cancellation import watch_signals


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_termination_raised_within_a_callback_stops_the_flow() -> None:
    def busy() -> None:
        raise TerminationSignal(15)

    async def flow() -> None:
        watch_signals()
        asyncio.get_running_loop().call_soon(busy)
        await asyncio.sleep(30)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(flow())


def test_other_faults_of_callbacks_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def faulty() -> None:
        raise KeyError("x")

    async def flow() -> str:
        watch_signals()
        asyncio.get_running_loop().call_soon(faulty)
        await asyncio.sleep(0.01)
        return "done"

    assert asyncio.run(flow()) == "done"
    assert "KeyError" in caplog.text
