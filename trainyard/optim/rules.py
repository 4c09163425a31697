"""Update rules of parameters: AdamW, Lion and SGD.

A rule takes flat or shaped tensors, many at once, and is stateless."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from trainyard.optim.config import OptimizerConfig
from trainyard.optim.kernels import adam_kernel, choose_optimizer
from trainyard.optim.update import FlatRule, UpdateRule, UpdateTerms


class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimizerConfig, device_type: str = "cpu") -> None:
        """device_type: where the parameters are."""
        self._config = config
        self._kernel = adam_kernel(config.optimizer_backend)
        self.flat: FlatRule | None = None
        if choose_optimizer(config, device_type).backend == "triton":
            from trainyard.optim.flat_adamw import FlatAdamW  # needs a GPU's compiler

            self.flat = FlatAdamW(config)

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        moments: Sequence[list[Tensor]],
        terms: UpdateTerms,
    ) -> None:
        """One step for all of them."""
        config = self._config
        learning_rate, weight_decay, num_updates, grad_scale = terms
        if self._kernel is not None:
            unscale(grads, grad_scale)
            betas = (config.adam_beta1, config.adam_beta2)
            self._kernel(
                [grads, params, *moments],
                *(learning_rate, betas, config.adam_eps, num_updates, weight_decay),
            )
            return
        device = params[0].device
        step = torch.full((), float(num_updates), dtype=torch.float32, device=device)
        divisor = None
        if grad_scale != 1.0:
            divisor = torch.full((), grad_scale, dtype=torch.float32, device=device)
        # torch.optim.AdamW would call the same operator, but imports the compiler when it is built.
        torch.ops.aten._fused_adamw_(
            params,
            grads,
            *moments,
            [],
            [step] * len(params),
            lr=learning_rate,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            weight_decay=weight_decay,
            eps=config.adam_eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )


class Lion:
    """Sign of an interpolated momentum, with decoupled weight decay (arXiv:2302.06675, algorithm
    2). It keeps one moment, half of Adam's state."""

    moments: ClassVar[tuple[str, ...]] = ("momentum",)

    flat: ClassVar[FlatRule | None] = None

    def __init__(self, config: OptimizerConfig, device_type: str = "cpu") -> None:
        self._beta1, self._beta2 = config.lion_beta1, config.lion_beta2

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        moments: Sequence[list[Tensor]],
        terms: UpdateTerms,
    ) -> None:
        """One step for all of them."""
        (momenta,) = moments
        unscale(grads, terms.grad_scale)
        directions = torch._foreach_lerp(momenta, grads, 1.0 - self._beta1)
        torch._foreach_sign_(directions)
        if terms.weight_decay:
            torch._foreach_mul_(params, 1.0 - terms.learning_rate * terms.weight_decay)
        torch._foreach_add_(params, directions, alpha=-terms.learning_rate)
        torch._foreach_lerp_(momenta, grads, 1.0 - self._beta2)


class SGD:
    """Gradient descent with momentum; weight decay is part of the gradient, as in torch's."""

    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    flat: ClassVar[FlatRule | None] = None

    def __init__(self, config: OptimizerConfig, device_type: str = "cpu") -> None:
        self._momentum = config.sgd_momentum

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        moments: Sequence[list[Tensor]],
        terms: UpdateTerms,
    ) -> None:
        """One step for all of them."""
        (velocities,) = moments
        unscale(grads, terms.grad_scale)
        if terms.weight_decay:
            torch._foreach_add_(grads, params, alpha=terms.weight_decay)
        torch._foreach_mul_(velocities, self._momentum)
        torch._foreach_add_(velocities, grads)
        torch._foreach_add_(params, velocities, alpha=-terms.learning_rate)


def unscale(grads: list[Tensor], grad_scale: float) -> None:
    """Divide in place."""
    if grad_scale != 1.0:
        torch._foreach_mul_(grads, 1.0 / grad_scale)


RULES: dict[str, Callable[[OptimizerConfig, str], UpdateRule]] = {
    "adam": AdamW,
    "lion": Lion,
    "sgd": SGD,
}


def build_rule(config: OptimizerConfig, device_type: str) -> UpdateRule:
    """The rule of --optimizer, by the kernel of --optimizer-backend for this kind of device; with
    muon, the one of all that it does not update."""
    kind = config.muon_scalar_optimizer if config.optimizer == "muon" else config.optimizer
    return RULES[kind](config, device_type)
