"""The optimizer of a rank: updates parameters from the gradients of all its model chunks.

A step: wait for the sums over data-parallel ranks; sum the gradients of whole parameters that saw
parts of a sequence, and of both ends of a tied embedding; compute the norm over the whole model,
which shows any overflow; scale the gradients; update what this rank owns and publish it to the
model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainyard.optim.clip import clip_factor, count_zeros, sum_of_squares
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.host_piece import HostPiece
from trainyard.optim.muon import Muon
from trainyard.optim.owned_params import (
    Group,
    TraitsOf,
    UpdateUnit,
    WholeParameters,
)
from trainyard.optim.scaler import LossScaler
from trainyard.optim.schedule import Rates
from trainyard.optim.state import StateBox
from trainyard.optim.units import build_units
from trainyard.optim.update import FlatRule, FlatTensors, UpdateRule, UpdateTerms
from trainyard.parallel.data.chunk import Chunk
from trainyard.parallel.data.data_parallel import all_reduce_sum
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.tensor.gradients import reduce_partial_gradients
from trainyard.parallel.timing import Timed, untimed


class OptimizerGroups(Protocol):
    """Process groups besides the data-parallel group of each chunk; None for one rank."""

    @property
    def tp(self) -> ProcessGroup | None:
        """Ranks that share each matrix."""

    @property
    def model(self) -> ProcessGroup | None:
        """Ranks that together hold one copy of the parameters (tensor x pipeline)."""

    @property
    def expert_tp(self) -> ProcessGroup | None:
        """Ranks that share each matrix of an expert."""

    @property
    def expert_model(self) -> ProcessGroup | None:
        """Ranks that together hold one copy of all experts."""

    @property
    def embedding(self) -> ProcessGroup | None:
        """The first and the last pipeline stage, if this rank is one of them."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of an update, equal on all ranks of a model."""

    skipped: bool
    """A gradient was not finite, and nothing was updated."""
    grad_norm: float
    """Of the whole model, before clipping; without the scale of the loss."""
    loss_scale: float
    """Of the next step."""
    num_zeros: int | None = None
    """Numbers of the gradient that are zero, where they were asked for."""


GradientFacts: TypeAlias = tuple[float, int | None]
"""Their norm, and how many of their numbers are zero where that is counted."""


@dataclass(frozen=True, slots=True)
class GradientSums:
    """Norm and zero count of reduced gradients, on the device until read."""

    values: Tensor
    """Square of the norm, and zeros where they are counted; fp64."""

    def read(self, scale: float, numbers: Sequence[float] | None = None) -> GradientFacts:
        """For gradients divided by `scale`. numbers: the values, where they were read already."""
        square, *zeros = self.values.tolist() if numbers is None else numbers
        return _root(square) / scale, int(zeros[0]) if zeros else None


def _nothing() -> None:
    pass


class ModelOptimizer:
    """Updates the parameters of all chunks of this rank. A step is `zero`, the backward passes of
    losses multiplied by `loss_scale`, then `step` (or `reduce_gradients` and `update`)."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        config: OptimizerConfig,
        rule: UpdateRule,
        host_rule: UpdateRule,
        scaler: LossScaler,
        groups: OptimizerGroups,
        traits_of: TraitsOf,
        *,
        device: torch.device,
        tied: nn.Parameter | None = None,
    ) -> None:
        """host_rule: for state in host memory. traits_of: what build.py makes of the options.
        device: of the chunks, since a stage may have no parameters to infer it from. tied: this
        stage's end of an embedding that another stage has as well."""
        self.chunks = list(chunks)
        self.scaler = scaler
        self.num_updates = 0
        self.timed: Timed = untimed
        self.before_update: Callable[[], object] = _nothing
        """Called when parameters and states may be about to change."""
        self._config = config
        self._rule, self._host_rule = rule, host_rule
        self._muon = Muon(config, groups)
        self._groups = groups
        self._tied = tied
        self._units = build_units(self.chunks, traits_of, config.offloaded)
        self._host_units = [unit for unit in self._units if isinstance(unit, HostPiece)]
        self._device_units = [unit for unit in self._units if not isinstance(unit, HostPiece)]
        alone = groups.model is None and not any(c.is_sharded for c in self.chunks)
        self._is_alone = alone and all(isinstance(u, WholeParameters) for u in self._units)
        self._device = device
        self._tensor_parallel = ModelParallel(tp=groups.tp)
        self._has_main = False

    @property
    def loss_scale(self) -> float:
        """What to multiply the loss by before its backward pass."""
        return self.scaler.scale

    # --- a step -------------------------------------------------------------------------------

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        for chunk in self.chunks:
            chunk.zero()

    def step(
        self, rates: Rates, *, divisor: float = 1.0, count_grad_zeros: bool = False
    ) -> StepOutcome:
        """Reduce the gradients and update. divisor: what they are to be divided by beside the scale
        of the loss (the tokens of a step, where losses are weighed by token)."""
        self.reduce_gradients()
        found = self.measure(count_grad_zeros).read(self.scaler.scale * divisor)
        return self.update(rates, divisor=divisor, found=found)

    def reduce_gradients(self) -> None:
        """Complete the gradients: over data-parallel ranks, parts of a sequence, tied ends."""
        for chunk in self.chunks:
            chunk.finish()
        with self.timed("layernorm-grads-all-reduce"):
            for chunk in self.chunks:
                parameters = [member.parameter for member in chunk.members]
                reduce_partial_gradients(parameters, self._tensor_parallel, chunk.grad_of)
        if self._tied is not None and self._groups.embedding is not None:
            with self.timed("embedding-grads-all-reduce"):
                tied = self._chunk_of(self._tied).grad_of(self._tied)
                all_reduce_sum(tied, self._groups.embedding)

    def _chunk_of(self, parameter: nn.Parameter) -> Chunk:
        return next(c for c in self.chunks if any(m.parameter is parameter for m in c.members))

    @torch.no_grad()
    def update(
        self,
        rates: Rates,
        *,
        divisor: float = 1.0,
        found: GradientFacts | None = None,
    ) -> StepOutcome:
        """Update from reduced gradients, unless one is not finite. found: norm and zero
        count of the unscaled gradients, if `measure` was called."""
        self.before_update()
        scale = self.scaler.scale * divisor
        norm, num_zeros = found or self.measure().read(scale)
        skipped = not math.isfinite(norm)
        self.scaler.update(skipped)
        if not skipped:
            with self.timed("optimizer-inner-step"):
                self._update(rates, clip_factor(norm, self._config.clip_grad), scale)
        return StepOutcome(skipped, norm, self.scaler.scale, num_zeros)

    def _update(self, rates: Rates, factor: float, scale: float) -> None:
        if not self._has_main:
            self.adopt_model_parameters()
        self.num_updates += 1
        for host in self._host_units:
            host.fetch_grads()
        for unit in self._device_units:
            if self._rule.flat is not None and unit.flat is not None:
                self._update_flat(self._rule.flat, unit, unit.flat, rates, scale / factor)
            else:
                self._update_unit(unit, rates, factor, scale)
                unit.publish()
        for host in self._host_units:
            host.update(self._host_rule, rates, self.num_updates, factor, scale)
        for chunk in self.chunks:
            if chunk.gather is not None:
                chunk.gather.begin()

    def _update_unit(self, unit: UpdateUnit, rates: Rates, factor: float, scale: float) -> None:
        grads = unit.grads()
        if not grads and not unit.has_matrices:
            return
        grad_scale = scale / factor
        if not unit.keeps_main:  # with a main copy the kernel scales, which rounds once less
            if grads and factor / scale != 1.0:
                torch._foreach_mul_(grads, factor / scale)
            grad_scale = 1.0
        for group in unit.groups:
            terms = self._terms(group, rates, grad_scale)
            own = grads[group.members]
            if group.multipliers.is_orthogonalized:
                self._muon.accumulate(own, group.moments[0], terms)
            else:
                self._rule.update(group.mains, own, group.moments, terms)
        if unit.has_matrices:
            self._update_matrices(unit, grads, rates)

    def _update_matrices(self, unit: UpdateUnit, grads: list[Tensor], rates: Rates) -> None:
        """grads: of what Muon updates, what it is to orthogonalise."""
        whole = unit.whole_grads(grads)
        for group in unit.groups:
            if group.multipliers.is_orthogonalized:
                terms = self._terms(group, rates)
                pairs = zip(unit.pieces[group.members], whole[group.members], strict=True)
                for piece, matrix in pairs:
                    self._muon.apply(piece.main, piece.start, piece.parameter, matrix, terms)

    def _terms(self, group: Group, rates: Rates, grad_scale: float = 1.0) -> UpdateTerms:
        rate, decay = group.multipliers.rates_of(rates)
        return UpdateTerms(rate, decay, self.num_updates, grad_scale)

    def _update_flat(
        self,
        rule: FlatRule,
        unit: UpdateUnit,
        flat: FlatTensors,
        rates: Rates,
        grad_scale: float,
    ) -> None:
        for group in unit.groups:
            rule.update(flat, group.spans, self._terms(group, rates, grad_scale))

    # --- norms --------------------------------------------------------------------------------

    def measure(self, count_grad_zeros: bool = False) -> GradientSums:
        """Norm and zeros of the reduced gradients, over the whole model."""

        def sums(units: Sequence[UpdateUnit]) -> Tensor:
            grads = [grad for unit in units for grad in unit.raw_grads()]
            pieces = [piece for unit in units for piece in unit.pieces]
            counted = [g for g, piece in zip(grads, pieces, strict=True) if piece.is_counted]
            totals = [sum_of_squares(counted, self._device)]
            if count_grad_zeros:
                totals.append(count_zeros(counted, self._device))
            return torch.stack(totals)

        with self.timed("optimizer-clip-main-grad"):
            return GradientSums(sums(self._units) if self._is_alone else self._over_model(sums))

    @torch.no_grad()
    def params_norm(self) -> float:
        """L2 norm of all parameters of the whole model."""

        def squares(units: Sequence[UpdateUnit]) -> Tensor:
            mains = [p.main for unit in units for p in unit.pieces if p.is_counted]
            here = [main for main in mains if main.device.type == self._device.type]
            total = sum_of_squares(here, self._device)
            there = [main for main in mains if main.device.type != self._device.type]
            if there:  # offloaded
                total = total + sum_of_squares(there, there[0].device).to(self._device)
            return total

        return _root(self._over_model(squares).item())

    def _over_model(self, sums: Callable[[Sequence[UpdateUnit]], Tensor]) -> Tensor:
        """The sum over all ranks that own a part of the model: of experts those are others."""
        total = self._over_ranks(sums, of_experts=False)
        if any(chunk.of_experts for chunk in self.chunks):
            total += self._over_ranks(sums, of_experts=True)
        return total

    def _over_ranks(
        self, sums: Callable[[Sequence[UpdateUnit]], Tensor], *, of_experts: bool
    ) -> Tensor:
        chunks = [chunk for chunk in self.chunks if chunk.of_experts is of_experts]
        totals = sums([unit for unit in self._units if unit.of_experts is of_experts])
        groups = self._groups
        all_reduce_sum(totals, groups.expert_model if of_experts else groups.model)
        return all_reduce_sum(totals, next((c.shard_group for c in chunks if c.is_sharded), None))

    # --- what survives a kill -----------------------------------------------------------------

    def state_boxes(self) -> list[StateBox]:
        """Moments (`exp_avg.NAME`, `exp_avg_sq.NAME`, Muon's `momentum_buffer.NAME`) and, beside
        16-bit weights, `param.NAME` (fp32): what this rank has of them, as views of the live
        memory."""
        return [box for unit in self._units for box in unit.boxes()]

    def state_dict(self) -> dict[str, Any]:
        """State other than tensors; JSON-able."""
        return {"num_updates": self.num_updates, "loss_scaler": self.scaler.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, document: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, after the tensors of `state_boxes` were filled in place.

        Where fp32 parameters are kept, the model's are made from them."""
        self.num_updates = int(document["num_updates"])
        self.scaler.load_state_dict(document.get("loss_scaler", {}))
        self._has_main = True
        for unit in self._units:
            unit.restored()
        for chunk in self.chunks:
            if chunk.gather is not None:
                chunk.gather.begin()
        self.finish_parameters()

    @torch.no_grad()
    def adopt_model_parameters(self) -> None:
        """Copy the model's parameters, after they were initialised or loaded, to the main copy. The
        first update does it otherwise."""
        for unit in self._units:
            unit.adopt()
        self._has_main = True

    def finish_parameters(self) -> None:
        """Wait for all parameters, before anything but a forward pass reads them. Those that were
        sent in 8 bits are made from the main copies once more."""
        gathers = [chunk.gather for chunk in self.chunks if chunk.gather is not None]
        for gather in gathers:
            gather.finish()
        if any(gather.is_rounded for gather in gathers):
            for unit in self._units:
                unit.publish()
        for gather in gathers:
            gather.finish_exactly()


def _root(square: float) -> float:
    """A norm, as an fp32 number."""
    return float(torch.tensor(square, dtype=torch.float64).sqrt().float())
