"""The update rules against torch.optim, and AdamW against its formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.rules import SGD, AdamW, UpdateRule
from trainyard.testing.tolerances import FP32_UPDATE

SHAPES = [(5, 7), (7,), (3, 2, 2), ()]
CONFIG = OptimizerConfig(lr=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6, sgd_momentum=0.7)


def tensors(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def ours(rule: UpdateRule, dtype: torch.dtype, grad_scale: float = 1.0) -> list[Tensor]:
    params = tensors(0, dtype)
    moments = [[torch.zeros_like(p) for p in params] for _ in rule.moments]
    for step in range(1, 6):
        grads = [grad * grad_scale for grad in tensors(step, dtype)]
        rule.update(
            params,
            grads,
            moments,
            learning_rate=0.1 / step,
            weight_decay=0.3,
            num_updates=step,
            grad_scale=grad_scale,
        )
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


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, foreach=False)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.7, weight_decay=0.3)


@pytest.mark.parametrize(("rule", "reference"), [(AdamW, adamw), (SGD, sgd)])
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


def test_a_kernel_that_is_not_installed_is_told() -> None:
    with pytest.raises(ConfigError, match=r"--fused-adam apex: .*--fused-adam torch"):
        AdamW(OptimizerConfig(lr=0.1, fused_adam="apex"))
