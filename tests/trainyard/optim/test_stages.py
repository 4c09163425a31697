"""Pipeline stages: norms over all of them, and an embedding that two of them have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.trainyard.optim.sharded_parameters import (
    EMBEDDING,
    NUM_MICROBATCHES,
    STEPS,
    WHOLES,
    Case,
    One,
    Result,
    result_of,
    wholes_of,
)
from trainyard.optim.build import build_optimizer, grads_dtype, params_dtype
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.precision import PrecisionConfig
from trainyard.optim.schedule import Rates
from trainyard.parallel.data.data_parallel import DataParallel
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import ALONE, ProcessGroups, build_groups
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_UPDATE

COPY = "output_layer.weight"
FIRST = [EMBEDDING, "layers.0.norm.weight", "layers.0.fc1.weight", "layers.0.fc1.bias"]
LAST = [name for name in WHOLES if name not in FIRST]
ZERO = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=300)
OUTPUT_SALT = 50


class Stage(nn.Module):
    """Some parameters; the embedding is used at both ends."""

    def __init__(self, tp: int, tp_rank: int, names: list[str], is_last: bool) -> None:
        super().__init__()
        self.ones = nn.ModuleList(One(name, tp, tp_rank) for name in names)
        self.output: One | None = None
        if is_last:
            held = [one for one in self.ones if isinstance(one, One) and one.name == EMBEDDING]
            self.output = held[0] if held else One(EMBEDDING, tp, tp_rank)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        pairs = [(one.name, one.weight) for one in self.ones]
        if self.output is not None and self.output not in list(self.ones):
            pairs.append((COPY, self.output.weight))
        return pairs  # type: ignore[return-value]

    def forward(self, salt: int) -> Tensor:
        losses = [one(salt) for one in self.ones]
        if self.output is not None:
            losses.append(self.output(salt + OUTPUT_SALT))
        return torch.stack(losses).sum()


def run_stages(case: Case, pp: int) -> Result:
    """Some steps on the stage of this rank; the whole model where there is one."""
    groups: ProcessGroups = ALONE
    if dist.is_initialized():
        groups = build_groups(ParallelDims(dp=case.dp, tp=case.tp, pp=pp), dist.get_rank())
    names = [FIRST, LAST][groups.pp_rank] if pp > 1 else list(WHOLES)
    stage = Stage(case.tp, groups.tp_rank, names, groups.is_last_stage)
    stage.to(params_dtype(case.precision))
    named = stage.named()
    ends = [parameter for name, parameter in named if name in (EMBEDDING, COPY)]
    parallel = DataParallel(
        named,
        groups.dp_cp,
        case.data,
        grad_dtype=grads_dtype(case.precision),
        alone={EMBEDDING, COPY},
    )
    optimizer = build_optimizer(
        [parallel],
        case.optimizer,
        case.precision,
        groups,
        device=torch.device("cpu"),
        tied=ends[0] if pp > 1 else None,
        copies={COPY: EMBEDDING},
    )
    outcomes = []
    for step in range(1, STEPS + 1):
        optimizer.zero()
        for number in range(groups.dp_rank, NUM_MICROBATCHES, case.dp):
            torch.autograd.backward(stage(step * 100 + number) / NUM_MICROBATCHES)
        outcomes.append(optimizer.step(Rates(0.1 / step, 0.1, 0.1 / step)))
    held = [(EMBEDDING if name == COPY else name, parameter) for name, parameter in named]
    return result_of(optimizer, held, outcomes)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("precision", [PrecisionConfig(), PrecisionConfig(bf16=True)])
@pytest.mark.parametrize(("dp", "tp", "data"), [(1, 1, None), (1, 2, None), (2, 2, ZERO)])
def test_stages_take_the_step_of_the_whole_model(
    ranks: RankPool, dp: int, tp: int, data: DataParallelConfig | None, precision: PrecisionConfig
) -> None:
    # On one stage backward adds both uses of the embedding up in bf16, of which Adam makes much
    # where they cancel; so SGD there.
    config = OptimizerConfig(lr=0.1, clip_grad=5.0, optimizer="sgd" if precision.bf16 else "adam")
    case = Case(dp, tp, data or DataParallelConfig(), precision, config)
    alone = run_stages(replace(case, dp=1, tp=1, data=DataParallelConfig()), 1)
    results = ranks.run(run_stages, dp * tp * 2, case, 2)
    # Assembling asserts that both ends of the embedding, and its moments, are equal.
    found, expected = wholes_of(results), wholes_of([alone])
    bounds = FP32_UPDATE if not precision.bf16 else {"rtol": 1e-2, "atol": 1e-2}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        if tensor.dtype == torch.float32:
            torch.testing.assert_close(tensor, expected[name], **bounds)
    for result in results:
        assert result.params_norm == pytest.approx(alone.params_norm, rel=1e-4)
        for one, other in zip(result.outcomes, alone.outcomes, strict=True):
            assert one.grad_norm == pytest.approx(
                other.grad_norm, rel=1e-3 if precision.bf16 else 1e-5
            )
