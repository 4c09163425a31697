"""Ranks for whole trainings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainyard.testing.distributed import PRELOADED
from trainyard.testing.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Theirs is a compiler as well, which every rank that recomputes activations would import for
    seconds."""
    with RankPool(preloaded=(*PRELOADED, "torch._dynamo")) as pool:
        yield pool
