"""Which steps of a run folder go when another is there."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Retention:
    """Steps that stay, and those that only serve to continue from and pass. Told by threads."""

    def __init__(self, keep_last: int, staying: Iterable[int], passing: Iterable[int]) -> None:
        """keep_last: the newest steps that do not go yet."""
        self._keep_last = keep_last
        self._passing = list(passing)
        self._newest = sorted([*staying, *self._passing])
        self._lock = threading.Lock()

    def published(self, step: int, stays: bool) -> list[int]:
        """A step is there: those that go now, which may be the step itself where newer ones are
        there already."""
        with self._lock:
            before = [s for s in self._passing if s != step]  # it may be there and be made good
            passing = before if stays else [*before, step]
            newest = sorted([*(s for s in self._newest if s != step), step])
            self._newest = newest[-self._keep_last :]
            self._passing = [s for s in passing if s in self._newest]
            return [s for s in passing if s not in self._newest]
