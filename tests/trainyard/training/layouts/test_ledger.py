"""A growing batch writes the same ledger at every layout, up to rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.trainyard.training.layouts.cases import VOCAB, Cut
from tests.trainyard.training.layouts.kinds import SEQ_LENGTH
from tests.trainyard.training.layouts.runs import SEED, train_module_of
from tests.trainyard.training.small_gpt import Counting
from trainyard.datasets.config import DataConfig
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.schedule import build_optimizer_schedule
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_LAYOUT
from trainyard.training.loop.data import RunData
from trainyard.training.loop.ledger import parse_ledger
from trainyard.training.loop.length import length_of
from trainyard.training.loop.loop import TrainLoop
from trainyard.training.loop.throughput import Workload
from trainyard.training.options.training import TrainingConfig

pytestmark = pytest.mark.slow

TRAINING = TrainingConfig(
    micro_batch_size=2,
    global_batch_size=16,
    rampup_batch_size=(4, 4, 24),
    train_samples=72,
    eval_interval=4,
    eval_iters=1,
    seed=SEED,
)
OPTIMIZER = OptimizerConfig(lr=0.01, adam_eps=1e-3, lr_warmup_samples=16)

COMPUTED = {
    "lm_loss": FP32_LAYOUT.loss,
    "validation_loss": FP32_LAYOUT.loss,
    "grad_norm": FP32_LAYOUT.grad_norm,
}
"""What sums make; all else in a ledger is exact."""


def ledger_of(cut: Cut) -> list[dict[str, Any]]:
    train_module = train_module_of(cut)
    length = length_of(TRAINING, cut.dp, SEQ_LENGTH)
    data = RunData(
        DataConfig(data_path=("none",)),
        Counting(SEQ_LENGTH, VOCAB, num_strides=3),
        (("valid", Counting(SEQ_LENGTH, VOCAB, num_strides=3)),),
        length.batch_size_schedule.final,
        train_module.groups.dp_rank,
    )
    optimizer_schedule = build_optimizer_schedule(
        OPTIMIZER, None, length.global_batch_size, TRAINING.train_samples
    )
    loop = TrainLoop(
        train_module,
        optimizer_schedule,
        data,
        TRAINING,
        length,
        Workload(SEQ_LENGTH, 1e6, cut.world_size),
    )
    assert loop.run() == "finished"
    return parse_ledger(loop.ledger.text())


OF_RANK_0 = ("samples",)
"""A digest over all ranks, which only the rank computes that writes the ledger."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "cut",
    [
        Cut(dp=2, reduction="zero overlap"),
        Cut(pp=2, chunks=2),
        pytest.param(Cut(tensor="tp2 sp", context="p2p", pp=2), marks=pytest.mark.slow),
        pytest.param(Cut(tensor="tp2", pp=2, dp=2, reduction="zero"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_growing_batch_gives_the_same_ledger_under_any_layout(cut: Cut, ranks: RankPool) -> None:
    expected = ledger_of(cut.alone())
    assert [line["global_batch_size"] for line in expected] == [4, 4, 8, 12, 16, 16]
    for rank, of_rank in enumerate(ranks.run(ledger_of, cut.world_size, cut)):
        for found, whole in zip(of_rank, expected, strict=True):
            right = {n: v for n, v in whole.items() if rank == 0 or n not in OF_RANK_0}
            assert found.keys() == right.keys()
            for name, value in right.items():
                if name in COMPUTED:
                    assert math.isclose(found[name], value, rel_tol=COMPUTED[name]), name
                else:
                    assert found[name] == value, name
