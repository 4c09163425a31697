"""The update rules against torch.optim, and AdamW against its formula."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.kernels import choose_optimizer, is_installed, report_optimizer
from trainyard.optim.rules import SGD, AdamW, Lion
from trainyard.optim.update import UpdateRule, UpdateTerms
from trainyard.testing.tolerances import FP32_UPDATE

SHAPES = [(5, 7), (7,), (3, 2, 2), ()]
CONFIG = OptimizerConfig(lr=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6, sgd_momentum=0.7)


def tensors(seed: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]


def ours(
    rule: UpdateRule, dtype: torch.dtype, grad_scale: float = 1.0, device: str = "cpu"
) -> list[Tensor]:
    params = tensors(0, dtype, device)
    moments = [[torch.zeros_like(p) for p in params] for _ in rule.moments]
    for step in range(1, 6):
        grads = [grad * grad_scale for grad in tensors(step, dtype, device)]
        rule.update(params, grads, moments, UpdateTerms(0.1 / step, 0.3, step, grad_scale))
    return params


def torchs(
    build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype
) -> list[Tensor]:
    params = [nn.Parameter(p) for p in tensors(0, dtype)]
    optimizer = build(params)
    for step in range(1, 6):
        optimizer.param_groups[0]["lr"] = 0.1 / step
        for parameter, grad in zip(params, tensors(step, dtype), strict=True):
            parameter.grad = grad
        optimizer.step()
    return [p.detach() for p in params]


ADAMW = partial(torch.optim.AdamW, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, foreach=False)
TORCH_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.7, weight_decay=0.3)


@pytest.mark.parametrize(("rule", "reference"), [(AdamW, ADAMW), (SGD, TORCH_SGD)])
@pytest.mark.parametrize("grad_scale", [1.0, 64.0, 3.0])
def test_rules_equal_torchs(
    rule: Callable[[OptimizerConfig], UpdateRule],
    reference: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    grad_scale: float,
) -> None:
    for dtype, bound in ((torch.float64, {"rtol": 1e-6, "atol": 1e-7}), (torch.float32, None)):
        expected = torchs(reference, dtype)
        for a, b in zip(ours(rule(CONFIG), dtype, grad_scale), expected, strict=True):
            torch.testing.assert_close(a, b, **(bound or FP32_UPDATE))


def test_adamw_is_the_formula() -> None:
    p = tensors(0, torch.float64)[0]
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step in range(1, 6):
        g, rate = tensors(step, torch.float64)[0], 0.1 / step
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        root = (v / (1 - 0.95**step)).sqrt() + 1e-6
        p = p * (1 - rate * 0.3) - rate * (m / (1 - 0.8**step)) / root
    torch.testing.assert_close(ours(AdamW(CONFIG), torch.float32)[0].double(), p, **FP32_UPDATE)


@pytest.mark.parametrize("grad_scale", [1.0, 3.0])
def test_lion_is_the_published_algorithm(grad_scale: float) -> None:
    """Algorithm 2 of arXiv:2302.06675, a number at a time."""
    config = replace(CONFIG, lion_beta1=0.9, lion_beta2=0.99)
    found = ours(Lion(config), torch.float64, grad_scale)
    for number, result in enumerate(found):
        values = tensors(0, torch.float64)[number].flatten().tolist()
        momenta = [0.0] * len(values)
        for step in range(1, 6):
            grads = tensors(step, torch.float64)[number].flatten().tolist()
            for i, g in enumerate(grads):
                update = 0.9 * momenta[i] + 0.1 * g
                sign = (update > 0) - (update < 0)
                values[i] -= 0.1 / step * (sign + 0.3 * values[i])
                momenta[i] = 0.99 * momenta[i] + 0.01 * g
        expected = torch.tensor(values, dtype=torch.float64).reshape(result.shape)
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


# --- whose kernel -------------------------------------------------------------------------------


def chosen(request: Any, device_type: str, *there: str, kind: Any = "adam") -> tuple[str, str]:
    config = OptimizerConfig(lr=0.1, optimizer=kind, optimizer_backend=request)
    choice = choose_optimizer(config, device_type, there.__contains__)
    return choice.backend, choice.kernel


def test_torch_updates_unless_another_is_asked_for() -> None:
    there = ("amp_C", "transformer_engine")
    for request in ("auto", "torch"):
        for device_type in ("cpu", "cuda"):
            assert chosen(request, device_type, *there) == ("torch", "fused_adamw")
            for kind in ("lion", "sgd"):
                assert chosen(request, device_type, *there, kind=kind) == ("torch", "foreach")
            muon = chosen(request, device_type, *there, kind="muon")
            assert muon == ("torch", "newton_schulz")
    for request in ("apex", "transformer_engine"):
        assert chosen(request, "cuda", *there) == (request, "multi_tensor_adam")


@pytest.mark.parametrize(
    ("request_", "device_type", "there", "words"),
    [
        ("apex", "cpu", ("amp_C",), "apex needs a CUDA device, not cpu"),
        ("apex", "cuda", ("transformer_engine",), "apex is not installed with its amp_C"),
        ("transformer_engine", "cpu", (), "Transformer Engine needs a CUDA device"),
        ("transformer_engine", "cuda", ("amp_C",), "Transformer Engine is not installed. Use"),
    ],
)
def test_a_kernel_that_cannot_be_had_is_refused_in_words(
    request_: str, device_type: str, there: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        chosen(request_, device_type, *there)
    assert str(refusal.value).startswith(f"--optimizer-backend {request_} is not available here")
    assert "--optimizer-backend auto" in str(refusal.value)


def test_packages_have_adam_alone() -> None:
    words = "--optimizer-backend apex has a kernel for --optimizer adam, not for sgd"
    with pytest.raises(ConfigError, match=words):
        OptimizerConfig(lr=0.1, optimizer="sgd", optimizer_backend="apex")


def test_a_package_that_does_not_load_is_reported() -> None:
    if is_installed("amp_C"):
        pytest.skip("apex is installed")
    with pytest.raises(ConfigError, match=r"--optimizer-backend apex: .*--optimizer-backend torch"):
        AdamW(OptimizerConfig(lr=0.1, optimizer_backend="apex"))


def test_one_line_says_what_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        report_optimizer(CONFIG, torch.device("cpu"))
        report_optimizer(CONFIG, torch.device("cpu"), say=False)
    assert caplog.messages == ["optimizer=adam backend=torch kernel=fused_adamw: the one for cpu"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["apex", "transformer_engine"])
@pytest.mark.parametrize("grad_scale", [1.0, 3.0])
def test_kernels_of_packages_update_as_torchs(backend: Any, grad_scale: float) -> None:
    config = replace(CONFIG, optimizer_backend=backend)
    try:
        choose_optimizer(config, "cuda")
    except ConfigError as refusal:
        pytest.skip(str(refusal))
    expected = torchs(ADAMW, torch.float32)
    for a, b in zip(ours(AdamW(config), torch.float32, grad_scale, "cuda"), expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, **FP32_UPDATE)
