"""How long training waits for its data: what a loader that is too slow costs.

On CUDA the host runs ahead of the device, so a short wait may be hidden; a share of some percent
means the loader is the bottleneck wherever it is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


def _nothing() -> None:
    pass


class DataWait:
    """Measures the time in `next` of the iterators that it watches."""

    def __init__(self, beat: Callable[[], None] = _nothing) -> None:
        """beat: called for every batch that came: a sign of life."""
        self._beat = beat
        self._seconds = 0.0

    def watch(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches."""
        return _Watched(self, batches)

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def add(self, seconds: float) -> None:
        """A batch was waited for so long."""
        self._seconds += seconds
        self._beat()


class _Watched(Iterator[T]):
    def __init__(self, wait: DataWait, batches: Iterator[T]) -> None:
        self._wait = wait
        self._batches = batches

    def __next__(self) -> T:
        began = time.perf_counter()
        batch = next(self._batches)
        self._wait.add(time.perf_counter() - began)
        return batch
