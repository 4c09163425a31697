"""What a plan says that a rank keeps of a model is what its tensors come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean
from typing import Any

import pytest
from torch import Tensor, nn

from tests.trainyard.training.layouts.cases import (
    MICRO_BATCH_SIZE,
    NUM_MICROBATCHES,
    Cut,
)
from tests.trainyard.training.layouts.runs import batches, train_module_of
from trainyard.checkpoint.layout import slices_held
from trainyard.checkpoint.model_tensors import model_tensors
from trainyard.models.costs.memory_detail import detailed_memory
from trainyard.models.parallel_layout import ParallelLayout
from trainyard.optim.schedule import Rates
from trainyard.testing.pool import RankPool
from trainyard.training.loop.batch_size import BatchSize

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

MIXTRAL = {"kind": "mixtral", "num_layers": 2}
CUTS = [
    Cut(kind="llama", dp=2, bf16=True),
    Cut(kind="llama", dp=4, reduction="zero", instances=2, bf16=True),
    Cut(kind="llama", dp=2, reduction="optim_grads", bf16=True),
    Cut(kind="llama", dp=2, reduction="optim_grads_params", bf16=True),
    Cut(kind="llama", dp=4, reduction="optim_grads_params", instances=2, tied=False),
    Cut(kind="llama", dp=2, reduction="optim_grads", tied=False),
    Cut(**MIXTRAL, dp=4, ep=2, reduction="optim_grads_params", bf16=True),
    Cut(**MIXTRAL, dp=2, ep=2, reduction="optim_grads_params"),
]


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes on a rank."""

    parameters: int
    gradients: int
    optimizer: int


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_plan_counts_what_ranks_keep_of_a_model(cut: Cut, ranks: RankPool) -> None:
    """On average over the ranks: pieces of buckets need not be of one length."""
    found: list[Kept] = ranks.run(kept_by, cut.world_size, cut)
    layout = ParallelLayout(
        dp=cut.dp,
        ep=cut.ep,
        sharding=cut.parallel.data_parallel.sharding,
        instances=cut.instances,
        fp32=not cut.bf16,
    )
    plan = detailed_memory(cut.model, cut.padded_vocab_size, layout)
    for kind in ("parameters", "gradients", "optimizer"):
        assert mean(getattr(kept, kind) for kept in found) == getattr(plan, kind), kind


def kept_by(cut: Cut) -> Kept:
    """Take a step, and count."""
    train_module = train_module_of(cut)
    (chunk,) = train_module.chunks
    most = [0]

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        whole = (p for p in chunk.parameters() if not hasattr(p, "to_local"))
        most[0] = max(most[0], size_of(whole))

    hooks = [module.register_forward_hook(count) for module in chunk.modules()]
    size = BatchSize(NUM_MICROBATCHES * MICRO_BATCH_SIZE, MICRO_BATCH_SIZE, cut.dp)
    train_module.step(1, size, batches(cut, 1, train_module.groups), Rates(0.01, 0.1, 0.01))
    for hook in hooks:
        hook.remove()
    optimizer = train_module.optimizer
    optimizer.finish_parameters()
    gradients = (part.grad_of(m.parameter) for part in optimizer.chunks for m in part.members)
    state = size_of(box.tensor for box in optimizer.state_boxes())
    is_fully_sharded = cut.parallel.data_parallel.fully_shards
    if is_fully_sharded and not cut.bf16:  # the rows are no state of their own
        rows = model_tensors([chunk], to_fill=True)
        own = [s.tensor for name, held in rows.items() for s in slices_held(name, held)]
        state += size_of(own) - size_of(p for p in chunk.parameters() if not hasattr(p, "to_local"))
    return Kept(most[0], size_of(gradients), state)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
