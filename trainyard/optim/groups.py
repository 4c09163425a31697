"""Which parameters share their rates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters, by name in the model's order, that are updated alike."""

    parameters: dict[str, nn.Parameter]
    has_weight_decay: bool


def group_parameters(named: Iterable[tuple[str, nn.Parameter]]) -> list[ParameterGroup]:
    """Matrices with weight decay; biases and other vectors (norms) without."""
    groups = [ParameterGroup({}, True), ParameterGroup({}, False)]
    for name, parameter in named:
        if parameter.requires_grad:
            is_vector = parameter.ndim == 1 or name.endswith(".bias")
            groups[is_vector].parameters[name] = parameter
    return [group for group in groups if group.parameters]
