"""--deterministic-mode refuses what would not be."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from trainyard.errors import ConfigError
from trainyard.training.randomness import REPRODUCIBLE, use_deterministic_algorithms


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def test_without_a_word_sums_come_in_one_order() -> None:
    use_deterministic_algorithms()
    assert os.environ["NCCL_ALGO"] == "^NVLS"
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("algorithm", REPRODUCIBLE)
def test_reproducible_algorithms_are_kept(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", algorithm)
    use_deterministic_algorithms()
    assert os.environ["NCCL_ALGO"] == algorithm


@pytest.mark.parametrize("algorithm", ["NVLS", "NVLSTree", "Ring,NVLS", ""])
def test_others_are_refused_by_name(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", algorithm)
    with pytest.raises(ConfigError, match=f"NCCL_ALGO={algorithm}: .* leave it unset"):
        use_deterministic_algorithms()
