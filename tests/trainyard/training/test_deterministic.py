"""--deterministic-mode refuses what would not be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trainyard.attention.select import Device, Needs, choose_backend
from trainyard.errors import ConfigError
from trainyard.training.loop.prepare import REPRODUCIBLE, use_deterministic_algorithms


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def test_without_nccl_algo_a_fixed_order_is_chosen() -> None:
    use_deterministic_algorithms()
    assert os.environ["NCCL_ALGO"] == "^NVLS"
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("algorithm", REPRODUCIBLE)
def test_reproducible_algorithms_are_kept(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", algorithm)
    use_deterministic_algorithms()
    assert os.environ["NCCL_ALGO"] == algorithm


@pytest.mark.parametrize("algorithm", ["NVLS", "NVLSTree", "Ring,NVLS", ""])
def test_other_algorithms_are_refused_by_name(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", algorithm)
    with pytest.raises(ConfigError, match=f"NCCL_ALGO={algorithm}: .* leave it unset"):
        use_deterministic_algorithms()


# --- kernels of attention ---------------------------------------------------------------------

BF16: dict[str, Any] = {"dtype": "bfloat16", "head_dim": 128}
HOPPER, ENGINE = Device("cuda", (9, 0)), Device("cuda", (9, 0), transformer_engine=True)
FLASH_4 = Device("cuda", (10, 0), flash_attn=4)


@pytest.mark.parametrize(
    ("device", "needs", "refused"),
    [(HOPPER, {}, ["cuDNN"]), (ENGINE, {"window": True}, ["cuDNN", "Transformer Engine"])],
)
def test_a_requested_kernel_that_is_not_reproducible_is_refused(
    device: Device, needs: dict[str, Any], refused: list[str]
) -> None:
    assert choose_backend("fused", ENGINE, Needs(**BF16, **needs)).kernel == "cudnn"
    with pytest.raises(ConfigError) as refusal:
        choose_backend("fused", device, Needs(**BF16, deterministic=True))
    words = str(refusal.value)
    assert words.startswith("--attention-backend fused is not available here: ")
    assert f"{refused[0]} is not bitwise reproducible in its backward pass (--det" in words
    assert all(f"{name} is not" in words for name in refused)
    assert words.endswith("Use --attention-backend auto, or unfused, which always works")


@pytest.mark.parametrize(
    ("request_", "device", "needs", "expected", "passed_over"),
    [
        ("auto", HOPPER, {}, ("sdpa", "flash"), "cuDNN"),
        ("auto", HOPPER, {"dtype": "float32"}, ("sdpa", "math"), "torch's efficient"),
        ("auto", FLASH_4, {}, ("sdpa", "flash"), "flash-attn 4"),
        ("flash", FLASH_4, {}, ("sdpa", "flash"), "flash-attn 4"),
    ],
)
def test_kernels_that_are_not_reproducible_are_skipped_with_the_reason(
    request_: Any,
    device: Device,
    needs: dict[str, Any],
    expected: tuple[str, str],
    passed_over: str,
) -> None:
    free = choose_backend(request_, device, Needs(**BF16 | needs))
    found = choose_backend(request_, device, Needs(**BF16 | needs, deterministic=True))
    assert (found.backend, found.kernel) == expected != (free.backend, free.kernel)
    assert f"{passed_over} is not bitwise reproducible in its backward pass" in found.reason


@pytest.mark.parametrize("version", [2, 3])
def test_kernels_with_a_deterministic_mode_use_it(version: int) -> None:
    device = Device("cuda", (9, 0), flash_attn=version)
    needs = Needs(**BF16, deterministic=True)
    choice = choose_backend("flash", device, needs)
    assert (choice.backend, choice.kernel) == ("flash", f"flash{version}")
