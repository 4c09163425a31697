"""An event loop whose clock jumps to the next timer: sleeps are exact and take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from trainyard.load_test import driver

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "all tasks wait, and for no timer"
            self.now += timeout
        return found


def run_virtually(monkeypatch: pytest.MonkeyPatch, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, with the driver's clock that of the loop."""
    selector = _Selector()
    loop = asyncio.SelectorEventLoop(selector)
    monkeypatch.setattr(loop, "time", lambda: selector.now)
    monkeypatch.setattr(driver, "CLOCK", lambda: selector.now)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
