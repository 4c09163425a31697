"""Delayed scaling: 8-bit scales from the maxima of past steps (arXiv:2209.05433, section 3.3).

A tensor without a past is scaled by its present maximum. At scale 1, as in Transformer Engine, many
gradients of a first step are below the smallest number of e5m2 and become zeros: matrices do not
learn from them, and tensors behind them do not show their maxima.

The maxima of a step are known after its backward pass. They reach this module as the gradient of a
probe, a tensor of no other use: so nothing is written inside of compiled layers, and a layer that
is recomputed or only evaluated needs no rule of its own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainyard.fp8.cast import FORWARD, WIDE, scale_of
from trainyard.fp8.recipe import Fp8Recipe

TENSORS = 3
"""Of a linear map: input, weight, gradient of the output."""


class DelayedScaling:
    """Scales of the tensors of one linear map, and the maxima that they come from; or of the same
    linear map of all experts of a layer, one after the other.

    n tensors: 3 of each map."""

    def __init__(self, recipe: Fp8Recipe, device: torch.device, num_maps: int = 1) -> None:
        self._recipe, num_tensors = recipe, num_maps * TENSORS
        self.state = torch.zeros(num_tensors, 1 + recipe.history_length, device=device)
        """(n, 1 + history): the scale of each tensor, 0 before it has one, then its maxima, the
        newest step first."""
        self.probe = torch.zeros(num_tensors, device=device, requires_grad=True)
        self.largest = torch.zeros(num_tensors, device=device)
        """Maxima over the micro-batches of this step, on this rank."""
        gradients = WIDE if recipe.format == "hybrid" else FORWARD
        self._limits = torch.tensor(
            [torch.finfo(dtype).max for dtype in (FORWARD, FORWARD, gradients)] * num_maps,
            device=device,
        )
        ours = weakref.ref(self)  # Python's collector does not see what hooks hold

        def take(probe: Tensor) -> None:
            if (alive := ours()) is not None and probe.grad is not None:
                torch.maximum(alive.largest, probe.grad, out=alive.largest)
            probe.grad = None

        self.probe.register_post_accumulate_grad_hook(take)

    @property
    def scales(self) -> Tensor:
        """(n,), of this step; 0: none yet."""
        return self.state[:, 0]

    def of_map(self, number: int) -> tuple[Tensor, Tensor]:
        """Scales of this map's input, weight and gradient, and the probe that takes their maxima;
        (3,) each."""
        tensors = slice(number * TENSORS, (number + 1) * TENSORS)
        return self.scales[tensors], self.probe[tensors]

    @torch.no_grad()
    def advance(self, largest: Tensor) -> None:
        """Take the maxima of a step, (n,), into the history, and scale the next one by it. A scale
        stays if all maxima are 0 or one is not finite."""
        history = torch.cat([largest[:, None], self.state[:, 1:-1]], dim=1)
        known = history.amax(1) if self._recipe.amax_compute_algo == "max" else largest
        found = self._limits / known / 2.0**self._recipe.margin
        is_usable = (known > 0) & known.isfinite() & found.isfinite()
        scales = torch.where(is_usable, found, self.scales)
        self.state.copy_(torch.cat([scales[:, None], history], dim=1))
        self.largest.zero_()


def known_or_own(scale: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale of past steps, or that of the tensor's own maximum if there is none; () fp32. In the
    first step each rank scales its part of a tensor so, as with `tensorwise`."""
    return torch.where(scale > 0, scale, scale_of(largest, dtype))


@torch.no_grad()
def advance_all(scalings: Sequence[DelayedScaling], group: ProcessGroup | None) -> None:
    """End a step for all linear maps of a pipeline stage: maxima are over its ranks, so that from
    then on each tensor has one scale, however it is cut. group: these ranks; all call it."""
    if not scalings:
        return
    largest = torch.cat([scaling.largest for scaling in scalings])
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    parts = largest.split([len(scaling.largest) for scaling in scalings])
    for scaling, found in zip(scalings, parts, strict=True):
        scaling.advance(found)
