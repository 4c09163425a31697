"""AdamW with decoupled weight decay, its state known by parameter name.

A thin shell around torch's fused update. What a checkpoint needs comes out as plain tensors named
`exp_avg.NAME` and `exp_avg_sq.NAME`, and the number of updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from trainyard.optim.config import OptimizerConfig
from trainyard.optim.groups import ParameterGroup

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Updates groups of parameters; the caller gives the rates of each step."""

    def __init__(self, groups: Sequence[ParameterGroup], config: OptimizerConfig) -> None:
        self.groups = groups
        self.num_updates = 0
        self.parameters = {n: p for group in groups for n, p in group.parameters.items()}
        self._optimizer = torch.optim.AdamW(
            [{"params": list(group.parameters.values())} for group in groups],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=0.0,
            fused=True,
        )
        for parameter in self.parameters.values():
            self._optimizer.state[parameter] = _fresh_state(parameter)

    @property
    def grads(self) -> list[Tensor]:
        """The gradient of every parameter, in order; zeros where the last step did not reach
        one."""
        return [_gradient(parameter) for parameter in self.parameters.values()]

    def step(self, learning_rate: float, weight_decay: float) -> None:
        """One update from the gradients that the parameters hold."""
        for group, options in zip(self.groups, self._optimizer.param_groups, strict=True):
            options["lr"] = learning_rate
            options["weight_decay"] = weight_decay if group.has_weight_decay else 0.0
        self._optimizer.step()
        self.num_updates += 1

    def state_tensors(self) -> dict[str, Tensor]:
        """`exp_avg.NAME` and `exp_avg_sq.NAME`, the live tensors."""
        return {
            f"{moment}.{name}": self._optimizer.state[parameter][moment]
            for moment in MOMENTS
            for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def load_state(self, num_updates: int, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `state_tensors` and `num_updates` were."""
        for name, live in self.state_tensors().items():
            live.copy_(tensors[name])
        self.set_num_updates(num_updates)

    def set_num_updates(self, num_updates: int) -> None:
        """How many updates the moments hold, when those were filled in place."""
        for parameter in self.parameters.values():
            self._optimizer.state[parameter]["step"].fill_(float(num_updates))
        self.num_updates = num_updates


def _fresh_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    zeros = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
    # fp32 and on the parameter's device, as the fused update wants it
    return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **zeros}


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
