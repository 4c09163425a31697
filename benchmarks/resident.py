"""Whether the memory of a process grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

TENTHS = 10
LEAST_SAMPLES = 3
"""The first is of the warm-up, and two are compared."""


def resident_bytes(process: int) -> int:
    """Memory of a process that is in RAM; what it shares with others counts too."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(process: int) -> list[int]:
    """The processes that the first thread of a process started."""
    return [int(p) for p in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def growth(samples: Sequence[int]) -> tuple[float, float, float]:
    """Medians of the second tenth of the samples and of the last, and their difference in parts of
    the former. The first tenth is the warm-up. ValueError for fewer than LEAST_SAMPLES."""
    if len(samples) < LEAST_SAMPLES:
        raise ValueError(f"{len(samples)} samples of the memory, and growth needs {LEAST_SAMPLES}")
    size = max(len(samples) // TENTHS, 1)
    before, after = statistics.median(samples[size : 2 * size]), statistics.median(samples[-size:])
    return before, after, after / before - 1
