"""Mixtures of experts spread over ranks: five steps come to what one process comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_equals_one_process
from tests.trainyard.training.layouts.kinds import KINDS
from tests.trainyard.training.layouts.runs import run_of
from trainyard.models.moe_config import MoEConfig
from trainyard.testing.pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

CUTS = [
    Cut(kind="mixtral", num_layers=2, dp=2, ep=2),
    Cut(kind="mixtral", num_layers=2, dp=4, ep=4, reduction="zero"),
    Cut(kind="mixtral", num_layers=2, dp=4, ep=2, reduction="zero overlap", recompute="full"),
    Cut(kind="mixtral", num_layers=2, tensor="tp2 sp", dp=2, ep=2, recompute="selective"),
    Cut(kind="mixtral", num_layers=2, tensor="tp2 sp", dp=2, ep=4, etp=1, reduction="zero"),
    Cut(kind="mixtral", num_layers=2, tensor="tp2 sp", dp=2, ep=2, etp=2, pp=2, reduction="zero"),
    Cut(kind="mixtral", num_layers=2, tensor="tp2 sp", etp=1),
    Cut(kind="mixtral", num_layers=2, context="allgather", ep=2),
    Cut(kind="mixtral", num_layers=4, pp=2, chunks=2, dp=2, ep=2, bf16=True),
    Cut(kind="mixtral", num_layers=2, pp=2, dp=4, ep=4, reduction="zero"),
    Cut(kind="mixtral", num_layers=2, dp=2, ep=2, per_token=True),
    Cut(kind="deepseek moe", num_layers=2, dp=2, ep=2),
    Cut(kind="deepseek moe", num_layers=2, tensor="tp2 sp", context="p2p", ep=4, etp=1),
    Cut(kind="deepseek moe", num_layers=4, pp=2, dp=2, ep=2, reduction="zero", recompute="block"),
    Cut(
        kind="deepseek moe", num_layers=2, tensor="tp2 sp", dp=2, ep=2, rank_order="ep-dp-tp-cp-pp"
    ),
    Cut(kind="gpt moe", num_layers=2, dp=2),
    Cut(kind="gpt moe", num_layers=2, dp=4, ep=2, reduction="overlap", recompute="full"),
    Cut(kind="gpt moe", num_layers=2, tensor="tp2 sp", dp=2, ep=2),
    Cut(kind="gpt moe", num_layers=2, tensor="tp2 sp", dp=2, ep=1, etp=4, reduction="zero"),
    Cut(kind="llama 4", num_layers=2, tensor="tp2 sp", dp=2, ep=2, reduction="zero"),
    Cut(kind="gpt-oss", num_layers=2, tensor="tp2 sp", dp=2, ep=2, reduction="zero"),
    Cut(kind="gpt-oss", num_layers=2, context="allgather", ep=2, recompute="selective"),
    Cut(kind="gpt-oss", num_layers=4, pp=2, context="a2a", ep=2, recompute="full"),
]


@pytest.mark.parametrize(
    "moe",
    [
        {"moe_expert_capacity_factor": 0.8},
        {
            "moe_expert_capacity_factor": 0.8,
            "moe_pad_expert_input_to_capacity": True,
            "moe_token_dispatcher_type": "alltoall",
        },
        {"moe_aux_loss_coeff": 0.05, "moe_router_load_balancing_type": "global_aux_loss"},
    ],
    ids=["capacity", "padded", "global balance"],
)
def test_what_replicas_decide_together_does_not_depend_on_where_experts_are(
    moe: dict[str, Any], ranks: RankPool
) -> None:
    """Capacity counts the tokens of a rank, so one process is no reference here."""
    kind = str(moe)
    define_kind(kind, moe)
    ranks.run(define_kind, 2, kind, moe)
    one, other = (
        run_of(Cut(kind=kind, num_layers=2, dp=2, ep=ep), ranks, num_steps=2) for ep in (1, 2)
    )
    assert one.losses == pytest.approx(other.losses, rel=1e-6)
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, other.tensors[name], rtol=1e-4, atol=1e-6)


def define_kind(name: str, moe: dict[str, Any]) -> None:
    """Make a kind of model known on a rank."""
    KINDS[name] = KINDS["llama"] | {"moe": MoEConfig(num_experts=4, **moe)}


@pytest.mark.recorded
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_experts_over_ranks_equal_one_process(cut: Cut, ranks: RankPool) -> None:
    assert_equals_one_process(cut, ranks)
