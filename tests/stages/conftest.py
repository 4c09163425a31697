"""What several stages' tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.trainyard.datasets.test_gpt import write_pair
from trainyard.testing.kill import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Starts pretraining and what it works with, torch being loaded once for all."""
    with Zygote("stages.pretrain.run", "stages.index.run") as process:
        yield process


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of forty documents."""
    prefix = write_pair(tmp_path_factory.mktemp("tokens") / "t", [60] * 40)
    for ending in (".bin", ".idx"):
        os.utime(prefix + ending, (1e9, 1e9))  # settled: their digests are remembered
    return prefix
