"""Which kernel is chosen for what, and what is said where none can be."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from trainyard.attention.select import Device, Needs, choose_backend
from trainyard.errors import ConfigError
from trainyard.models.attention import choose_attention
from trainyard.models.gpt.config import GPTConfig
from trainyard.parallel.model import ALONE

HOPPER, AMPERE = Device("cuda", (9, 0)), Device("cuda", (8, 0))
VOLTA, CPU = Device("cuda", (7, 0)), Device("cpu")
BF16: dict[str, Any] = {"dtype": "bfloat16", "head_dim": 128}


def chosen(request: Any, device: Device, **needs: Any) -> tuple[str, str]:
    choice = choose_backend(request, device, Needs(**(BF16 | needs)))
    return choice.backend, choice.kernel


@pytest.mark.parametrize(
    ("device", "needs", "expected"),
    [
        (HOPPER, {}, ("sdpa", "cudnn")),
        (HOPPER, {"sink": True}, ("sdpa", "cudnn")),
        (HOPPER, {"context": "p2p"}, ("sdpa", "cudnn")),
        (HOPPER, {"dropout": True}, ("sdpa", "cudnn")),
        (HOPPER, {"window": True}, ("sdpa", "flash")),
        (HOPPER, {"documents": True, "sink": True}, ("sdpa", "flash")),
        (HOPPER, {"deterministic": True}, ("sdpa", "flash")),
        (HOPPER, {"head_dim": 256}, ("sdpa", "flash")),
        (HOPPER, {"head_dim": 100}, ("sdpa", "efficient")),
        (HOPPER, {"dtype": "float32"}, ("sdpa", "efficient")),
        (HOPPER, {"dtype": "float32", "sink": True}, ("sdpa", "math")),
        (HOPPER, {"dtype": "float32", "deterministic": True}, ("sdpa", "math")),
        (AMPERE, {}, ("sdpa", "flash")),
        (VOLTA, {"dtype": "float16"}, ("sdpa", "efficient")),
        (HOPPER, {"bias": True}, ("sdpa", "efficient")),
        (HOPPER, {"bias": True, "deterministic": True}, ("sdpa", "math")),
        (CPU, {}, ("sdpa", "cpu")),
        (Device("mps"), {}, ("sdpa", "math")),
    ],
)
def test_auto_is_fastest(device: Device, needs: dict[str, Any], expected: tuple[str, str]) -> None:
    assert chosen("auto", device, **needs) == expected


def test_packages_serve_what_torch_does_not() -> None:
    flash2, flash3 = Device("cuda", (9, 0), flash_attn=2), Device("cuda", (9, 0), flash_attn=3)
    assert chosen("auto", flash2) == ("sdpa", "cudnn")
    assert chosen("auto", flash2, documents=True) == ("flash", "flash2")
    assert chosen("flash", flash3) == ("flash", "flash3")
    assert chosen("flash", flash3, dropout=True) == ("sdpa", "flash")
    assert chosen("flash", flash3, sink=True) == ("sdpa", "flash")
    assert chosen("flash", flash3, context="p2p") == ("sdpa", "flash")
    assert chosen("flash", flash3, context="a2a") == ("flash", "flash3")
    engine = Device("cuda", (9, 0), transformer_engine=True)
    assert chosen("fused", engine) == ("sdpa", "cudnn")
    assert chosen("fused", engine, window=True) == ("te", "cudnn")
    assert chosen("auto", engine, window=True) == ("sdpa", "flash")


@pytest.mark.parametrize(("request_", "kernel"), [("unfused", "sdpa"), ("local", "local")])
@pytest.mark.parametrize("device", [HOPPER, VOLTA, CPU])
def test_unfused_and_local_always_work(request_: str, kernel: str, device: Device) -> None:
    needs = {"window": True, "documents": True, "sink": True, "deterministic": True}
    assert chosen(request_, device, dtype="float64", **needs) == (kernel, "math")


@pytest.mark.parametrize(
    ("request_", "device", "needs", "words"),
    [
        ("fused", HOPPER, {"window": True}, "cuDNN has no windows .--window-size."),
        ("fused", HOPPER, {"documents": True}, "cuDNN has no packed documents"),
        ("fused", HOPPER, {"deterministic": True}, "cuDNN is not bitwise reproducible"),
        ("fused", CPU, {}, "cuDNN needs a CUDA device, not cpu"),
        ("fused", HOPPER, {"head_dim": 192}, "up to 128 channels, not 192"),
        ("flash", HOPPER, {"dtype": "float32"}, "FlashAttention-2 computes in bf16 and fp16"),
        ("flash", VOLTA, {}, "needs compute capability 8.0 or more, not 7.0"),
        (
            "fused",
            Device("cuda", (9, 0), transformer_engine=True),
            {"window": True, "sink": True},
            "Transformer Engine is not used for parts of the keys .--softmax-type.",
        ),
    ],
)
def test_what_is_refused(request_: str, device: Device, needs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        chosen(request_, device, **needs)
    assert str(refusal.value).startswith(f"--attention-backend {request_} is not available here")
    assert "--attention-backend auto" in str(refusal.value)


def test_the_reason_says_what_was_passed_over() -> None:
    reason = choose_backend("auto", HOPPER, Needs(**BF16, window=True)).reason
    assert "compute capability 9.0" in reason
    assert "cuDNN has no windows" in reason


def config(**changes: Any) -> GPTConfig:
    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8}
    return GPTConfig(**(sizes | changes))


def test_one_line_says_what_layers_use(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choose_attention(config(), ALONE, torch.device("cpu"), torch.float32, report=True)
    assert caplog.messages == ["attention backend=sdpa kernel=cpu: the one for cpu"]


def test_a_refusal_comes_before_any_work() -> None:
    asked = config(attention_backend="fused")
    with pytest.raises(ConfigError, match="--attention-backend fused"):
        choose_attention(asked, ALONE, torch.device("cpu"), torch.float32)


def test_use_flash_attn_is_the_flash_backend(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choose_attention(
            config(use_flash_attn=True), ALONE, torch.device("cpu"), torch.float32, report=True
        )
    assert "--attention-backend flash" in caplog.text
