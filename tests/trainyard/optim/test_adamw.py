"""AdamW against the formula, its groups, its state, and clipping."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from trainyard.optim.adamw import AdamW
from trainyard.optim.clip import clip_to_norm, global_norm
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.groups import group_parameters
from trainyard.testing.tolerances import FP32_UPDATE

CONFIG = OptimizerConfig(lr=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)


def build(seed: int = 0) -> AdamW:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    return AdamW(group_parameters(model.named_parameters()), CONFIG)


def give_grads(optimizer: AdamW, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.randn_like(parameter)


def test_vectors_have_no_weight_decay() -> None:
    decayed, others = build().groups
    assert sorted(decayed.parameters) == ["0.weight", "2.weight"]
    assert sorted(others.parameters) == ["0.bias", "1.bias", "1.weight", "2.bias"]


def test_update_is_the_formula() -> None:
    optimizer = build()
    p = optimizer.parameters["0.weight"]
    before = p.detach().double().clone()
    m, v = torch.zeros_like(before), torch.zeros_like(before)
    for step in range(1, 4):
        give_grads(optimizer, step)
        assert p.grad is not None
        g = p.grad.double()
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        before = before * (1 - 0.1 * 0.3)
        root = (v / (1 - 0.95**step)).sqrt() + 1e-6
        before = before - 0.1 * (m / (1 - 0.8**step)) / root
        optimizer.step(learning_rate=0.1, weight_decay=0.3)
    torch.testing.assert_close(p.detach().double(), before, **FP32_UPDATE)


def test_state_continues_bit_for_bit() -> None:
    whole, resumed = build(), build(seed=1)
    for step in range(3):
        give_grads(whole, step)
        whole.step(0.1, 0.01)
    with torch.no_grad():
        for name, parameter in resumed.parameters.items():
            parameter.copy_(whole.parameters[name])
    state = {name: tensor.clone() for name, tensor in whole.state_tensors().items()}
    resumed.load_state(whole.num_updates, state)
    for optimizer in (whole, resumed):
        give_grads(optimizer, 9)
        optimizer.step(0.05, 0.01)
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, resumed.parameters[name])


def test_norm_is_over_all_tensors_and_clipping_bounds_it() -> None:
    grads = [torch.full((3, 4), 2.0), torch.full((4,), 3.0)]
    norm = float(global_norm(grads))
    assert math.isclose(norm, math.sqrt(12 * 4 + 4 * 9), rel_tol=1e-6)
    clip_to_norm(grads, norm, bound=100.0)
    assert float(global_norm(grads)) == norm
    clip_to_norm(grads, norm, bound=1.0)
    assert float(global_norm(grads)) == pytest.approx(1.0, rel=1e-5)
