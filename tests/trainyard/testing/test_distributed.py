"""The first failure of a rank is the one that a test sees."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from trainyard.errors import ConfigError
from trainyard.testing import distributed
from trainyard.testing.distributed import run_distributed


def refuse() -> None:
    if dist.get_rank() == 1:
        raise ConfigError("--this is wrong")
    dist.barrier()


@pytest.mark.slow
@pytest.mark.distributed
def test_the_error_of_a_rank_reaches_the_test() -> None:
    with pytest.raises(ConfigError, match="--this is wrong"):
        run_distributed(refuse, 2)


def refuse_last() -> None:
    if dist.get_rank() == 1:
        raise ConfigError("--this is wrong")
    time.sleep(0.2)
    raise ConnectionError("rank 1 is gone")


@pytest.mark.slow
@pytest.mark.distributed
def test_the_error_of_a_rank_is_not_hidden_by_those_that_it_causes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks are looked at after both have failed, the one that lost its peer standing first."""
    slow = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(1))
    monkeypatch.setattr(distributed, "time", slow)
    with pytest.raises(ConfigError, match="--this is wrong"):
        run_distributed(refuse_last, 2)
