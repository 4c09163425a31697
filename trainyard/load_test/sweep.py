"""The search for the highest request rate that meets an SLO.

Knows nothing of requests: who asks it measures each rate, and says whether it met."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RateSearch:
    """Doubles a rate until one fails (halves it until one meets), then bisects between the two.

    Assumes that every rate below one that meets does too. Ends when the highest rate that met is
    within `tolerance` of one that failed, or after `max_probes` measurements."""

    first: float
    """Requests a second of the first measurement."""
    max_probes: int
    tolerance: float = 0.05
    """Part of the rate that failed."""
    best: float | None = None
    """The highest rate that met."""
    failed: float | None = None
    """The lowest rate that did not."""
    _num_probes: int = field(default=0, init=False)

    def next_rate(self) -> float | None:
        """The rate to measure next; None at the end."""
        if self._num_probes >= self.max_probes or self.is_narrow:
            return None
        if self.best is None:
            return self.first if self.failed is None else self.failed / 2
        if self.failed is None:
            return self.best * 2
        return (self.best + self.failed) / 2

    def record(self, rate: float, met: bool) -> None:
        """Take the outcome of a measurement."""
        self._num_probes += 1
        if met:
            self.best = rate if self.best is None else max(rate, self.best)
        else:
            self.failed = rate if self.failed is None else min(rate, self.failed)

    @property
    def is_narrow(self) -> bool:
        """Whether the answer is as exact as asked for; False after too few measurements."""
        if self.best is None or self.failed is None:
            return False
        return self.failed - self.best <= self.tolerance * self.failed
