"""Losses that jump. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 128
"""Losses that a new one is compared with."""
FEWEST = 16
"""Before so many were seen nothing is a spike."""
DEVIATIONS = 8.0
SHARE = 0.1
"""A spike is above the median by so many standard deviations and by this share of the median."""
MAD_TO_DEVIATION = 1.4826
"""Of a normal distribution; the median of deviations does not see earlier spikes."""


class SpikeDetector:
    """Compares each loss with those before it."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def bound(self) -> float:
        """What the next loss must not be above."""
        if len(self._losses) < FEWEST:
            return math.inf
        middle = statistics.median(self._losses)
        spread = statistics.median(abs(loss - middle) for loss in self._losses)
        return middle + max(DEVIATIONS * MAD_TO_DEVIATION * spread, SHARE * abs(middle))

    def is_spike(self, loss: float) -> bool:
        """Whether this loss, the next one, jumps."""
        return math.isfinite(loss) and loss > self.bound()

    def add(self, loss: float) -> None:
        """The loss of a step that was taken."""
        if math.isfinite(loss):
            self._losses.append(loss)
