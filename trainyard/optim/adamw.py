"""AdamW with decoupled weight decay, its state known by parameter name.

A thin shell around torch's fused update. What a checkpoint needs comes out as plain tensors named
`exp_avg.NAME` and `exp_avg_sq.NAME`, and the number of updates.

The operator is called as it is: torch.optim.AdamW would call the same one, but imports the compiler
when it is built, which costs a run two seconds."""

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
        self._config = config
        self._moments = {
            moment: {
                n: torch.zeros_like(p, requires_grad=False) for n, p in self.parameters.items()
            }
            for moment in MOMENTS
        }
        device = next(iter(self.parameters.values())).device
        self._step = torch.zeros((), dtype=torch.float32, device=device)

    @property
    def grads(self) -> list[Tensor]:
        """The gradient of every parameter, in order; zeros where the last step reached none."""
        return [_gradient(parameter) for parameter in self.parameters.values()]

    @torch.no_grad()
    def step(self, learning_rate: float, weight_decay: float) -> None:
        """One update from the gradients that the parameters hold."""
        self.num_updates += 1
        self._step.fill_(float(self.num_updates))
        for group in self.groups:
            members = group.parameters
            exp_avgs, exp_avg_sqs = ([self._moments[m][n] for n in members] for m in MOMENTS)
            torch.ops.aten._fused_adamw_(
                list(members.values()),
                [_gradient(parameter) for parameter in members.values()],
                exp_avgs,
                exp_avg_sqs,
                [],
                [self._step] * len(members),
                lr=learning_rate,
                beta1=self._config.adam_beta1,
                beta2=self._config.adam_beta2,
                weight_decay=weight_decay if group.has_weight_decay else 0.0,
                eps=self._config.adam_eps,
                amsgrad=False,
                maximize=False,
            )

    def state_tensors(self) -> dict[str, Tensor]:
        """`exp_avg.NAME` and `exp_avg_sq.NAME`, the live tensors."""
        return {f"{m}.{name}": t for m in MOMENTS for name, t in self._moments[m].items()}

    @torch.no_grad()
    def load_state(self, num_updates: int, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `state_tensors` and `num_updates` were.

        When the live tensors were filled in place, setting `num_updates` is enough."""
        for name, live in self.state_tensors().items():
            live.copy_(tensors[name])
        self.num_updates = num_updates


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
