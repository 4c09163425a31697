"""What several stages' tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stages.pretrain_runs import Pretrain, settled_pair
from trainyard.testing.kill import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Starts pretraining and what it works with, torch being loaded once for all."""
    with Zygote("stages.pretrain.run", "stages.index.run") as process:
        yield process


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of forty documents."""
    return settled_pair(tmp_path_factory.mktemp("tokens") / "t", [60] * 40)


@pytest.fixture(scope="module")
def pretrain(zygote: Zygote, tokens: str) -> Pretrain:
    """Runs stages.pretrain on the token files of the module."""
    return Pretrain(zygote, tokens)


@pytest.fixture(scope="module")
def finished(pretrain: Pretrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a stop: checkpoints 3, 6 and 8."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    pretrain(folder)
    return folder
