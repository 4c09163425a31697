"""A few parameters, cut as models cut them, with gradients that are functions of their names."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.trainyard.pieces import Piece, assembled
from trainyard.optim.build import build_optimizer, grads_dtype, params_dtype
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.optimizer import ModelOptimizer, StepOutcome
from trainyard.optim.precision import PrecisionConfig
from trainyard.optim.schedule import Rates
from trainyard.parallel.data.data_parallel import DataParallel
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import ALONE, ProcessGroups, build_groups
from trainyard.parallel.sharding import Shard, even_shard, mark_shard, shard_of

EMBEDDING = "embedding.word_embeddings.weight"
WHOLES: dict[str, tuple[tuple[int, ...], int | None, int]] = {
    # name: shape, dim that tensor parallelism cuts, parts
    EMBEDDING: ((20, 16), 0, 1),
    "layers.0.norm.weight": ((16,), None, 1),
    "layers.0.fc1.weight": ((24, 16), 0, 2),
    "layers.0.fc1.bias": ((24,), 0, 2),
    "layers.0.fc2.weight": ((16, 12), 1, 1),
    "layers.0.fc2.bias": ((16,), None, 1),
    "layers.1.odd": ((3, 5, 7), None, 1),
}
NUM_MICROBATCHES = 8
STEPS = 4


@dataclass(frozen=True)
class Case:
    """How a run is cut, and in which numbers."""

    dp: int = 1
    tp: int = 1
    data: DataParallelConfig = field(default_factory=DataParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=0.1, clip_grad=5.0)
    )
    divisor: float = 1.0
    bad_steps: tuple[int, ...] = ()
    """Steps in which the gradients of one micro-batch are infinite."""
    blank: tuple[str, ...] = ()
    """Parameters that the loss does not see."""


@dataclass(frozen=True)
class Result:
    """What a rank has in the end."""

    outcomes: list[StepOutcome]
    params: list[Piece]
    states: list[Piece]
    params_norm: float


def values(name: str, salt: int) -> Tensor:
    """A whole tensor drawn by name."""
    generator = torch.Generator().manual_seed(salt * 1000 + list(WHOLES).index(name))
    return torch.randn(WHOLES[name][0], generator=generator)


class One(nn.Module):
    """One parameter."""

    def __init__(self, name: str, tp: int, tp_rank: int) -> None:
        super().__init__()
        self.name = name
        shape, dim, parts = WHOLES[name]
        shard = None if dim is None or tp == 1 else even_shard(shape, dim, tp, tp_rank, parts)
        self.weight = nn.Parameter(self.own(values(name, 0), shard))
        if shard is not None:
            mark_shard(self.weight, shard)

    def own(self, whole: Tensor, shard: Shard | None) -> Tensor:
        return whole.clone() if shard is None else shard.take(whole)

    def forward(self, salt: int) -> Tensor:
        """A loss whose gradient has much of the salt and a little of the parameter."""
        constant = self.own(values(self.name, salt), shard_of(self.weight))
        loss = self.weight * constant.to(self.weight.dtype) + self.weight.square() * 0.125
        return loss.float().sum()


class Cut(nn.Module):
    """The parameters of one tensor-parallel rank, of some names."""

    def __init__(self, tp: int, tp_rank: int, names: Sequence[str] = tuple(WHOLES)) -> None:
        super().__init__()
        self.ones = nn.ModuleList(One(name, tp, tp_rank) for name in names)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(one.name, one.weight) for one in self.ones]  # type: ignore[misc]

    def forward(self, salt: int, blank: Sequence[str] = ()) -> Tensor:
        return torch.stack([one(salt) for one in self.ones if one.name not in blank]).sum()


def build(case: Case) -> tuple[Cut, ModelOptimizer, int]:
    """This rank's model and optimizer, and its data-parallel place."""
    groups: ProcessGroups = ALONE
    if dist.is_initialized():
        groups = build_groups(ParallelDims(dp=case.dp, tp=case.tp), dist.get_rank())
    model = Cut(case.tp, groups.tp_rank).to(params_dtype(case.precision))
    parallel = DataParallel(
        *(model.named(), groups.dp_cp, case.data),
        grad_dtype=grads_dtype(case.precision),
        always_flat=case.optimizer.offloaded > 0,
    )
    if parallel.gather is not None:
        parallel.gather.install(model)
    optimizer = build_optimizer(
        [parallel], case.optimizer, case.precision, groups, device=torch.device("cpu")
    )
    return model, optimizer, groups.dp_rank


def run_case(case: Case) -> Result:
    """Some steps on this rank of as many as the case has."""
    model, optimizer, dp_rank = build(case)
    outcomes = [take_step(step, case, model, optimizer, dp_rank) for step in range(1, STEPS + 1)]
    return result_of(optimizer, model.named(), outcomes)


def run_in_halves(case: Case) -> tuple[Result, Result]:
    """A run in one go, and one whose second half another optimizer takes from the saved state."""
    model, optimizer, dp_rank = build(case)
    half, steps = STEPS // 2, range(1, STEPS + 1)
    first = [take_step(step, case, model, optimizer, dp_rank) for step in steps[:half]]
    optimizer.finish_parameters()
    document = json.loads(json.dumps(optimizer.state_dict()))
    saved = [box.tensor.clone() for box in optimizer.state_boxes()]
    weights = [parameter.detach().clone() for _, parameter in model.named()]
    rest = [take_step(step, case, model, optimizer, dp_rank) for step in steps[half:]]
    whole = result_of(optimizer, model.named(), first + rest)
    other, continued, _ = build(case)
    with torch.no_grad():
        for (_, parameter), weight in zip(other.named(), weights, strict=True):
            parameter.copy_(weight)
        for box, tensor in zip(continued.state_boxes(), saved, strict=True):
            box.tensor.copy_(tensor)
    continued.load_state_dict(document)
    again = [take_step(step, case, other, continued, dp_rank) for step in steps[half:]]
    return whole, result_of(continued, other.named(), first + again)


def take_step(
    step: int, case: Case, model: Cut, optimizer: ModelOptimizer, dp_rank: int
) -> StepOutcome:
    """One step over this rank's micro-batches."""
    optimizer.zero()
    own = range(dp_rank, NUM_MICROBATCHES, case.dp)
    for number in own:
        if number == own[-1]:
            optimizer.chunks[0].sync_on_next_backward()
        loss = model(step * 100 + number, case.blank) * (optimizer.loss_scale / NUM_MICROBATCHES)
        if step in case.bad_steps and number == 1:
            loss = loss * math.inf
        torch.autograd.backward(loss)
    rates = Rates(0.1 / step, 0.02 * step, 0.3 / step)
    return optimizer.step(rates, divisor=case.divisor, count_grad_zeros=True)


def result_of(
    optimizer: ModelOptimizer, named: list[tuple[str, nn.Parameter]], outcomes: list[StepOutcome]
) -> Result:
    """Everything that a rank has, as it would be saved."""
    optimizer.finish_parameters()
    params: list[Piece] = []
    for name, parameter in named:
        shard = shard_of(parameter)
        shape = tuple(parameter.shape)
        if shard is None:
            params.append(Piece(name, parameter.detach().clone(), (0,) * len(shape), shape))
            continue
        for offset, index in shard.boxes():
            params.append(Piece(name, parameter.detach()[index].clone(), offset, shard.shape))
    states = [
        Piece(b.name, b.tensor.clone(), b.offset, b.global_shape) for b in optimizer.state_boxes()
    ]
    return Result(outcomes, params, states, optimizer.params_norm())


def wholes_of(results: list[Result]) -> dict[str, Any]:
    """Parameters and states of a run, whole."""
    return assembled([piece for result in results for piece in (*result.params, *result.states)])
