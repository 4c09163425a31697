"""Initial values of the parameters of a Mamba-2 mixer, as the paper's code and Megatron-LM draw
them, by the ends of their names."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trainyard.models.mamba.config import CONV_WIDTH

Rule = Callable[[Tensor, torch.Generator], object]
"""Fills a block of numbers, fp32 on the CPU."""

SHORTEST, LONGEST, FLOOR = 1e-3, 1e-1, 1e-4
"""Time steps before training are log-uniform between the first two, and no shorter than the
last."""

SLOWEST, FASTEST = 1.0, 16.0
"""Rates of decay (-A) before training."""


def _convolution(block: Tensor, generator: torch.Generator) -> None:
    """Uniform by the number of inputs, as torch's convolutions are."""
    bound = 1 / math.sqrt(CONV_WIDTH)
    block.uniform_(-bound, bound, generator=generator)


def _decay(block: Tensor, generator: torch.Generator) -> None:
    """Logarithms of uniform rates."""
    block.uniform_(SLOWEST, FASTEST, generator=generator).log_()


def _time_step(block: Tensor, generator: torch.Generator) -> None:
    """Biases whose softplus is a log-uniform time step."""
    block.uniform_(math.log(SHORTEST), math.log(LONGEST), generator=generator)
    steps = block.exp_().clamp_(min=FLOOR)
    block.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus


RULES: dict[str, Rule] = {
    ".mixer.conv1d.weight": _convolution,
    ".mixer.conv1d.bias": _convolution,
    ".mixer.A_log": _decay,
    ".mixer.dt_bias": _time_step,
}

ONES = (".mixer.D", ".mixer.norm.weight")


def drawn_by(name: str) -> Rule | None:
    """The rule of a parameter that has one of its own."""
    return next((rule for end, rule in RULES.items() if name.endswith(end)), None)


def is_one(name: str) -> bool:
    """Whether a parameter begins as 1, even where other norms keep their distance from 1."""
    return name.endswith(ONES)
