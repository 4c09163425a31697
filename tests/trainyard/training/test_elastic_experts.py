"""Resuming with experts on other ranks: a checkpoint reshards over expert parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import COMPUTED, exact, go, ledger
from tests.trainyard.training.test_elastic import Way
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_LAYOUT

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
    "swiglu": True,
    "disable_bias_linear": True,
    "check_weight_hash_across_dp_replicas_interval": 1,
}
FIGURES = {*COMPUTED, "more_losses", "layer_figures", "layer_loads"}


def test_a_run_travels_over_expert_parallel_layouts(ranks: RankPool, tmp_path: Path) -> None:
    tokens = write_pair(tmp_path / "t", [60] * 60)
    assert go(tokens, tmp_path / "whole", **EXPERTS) == "finished"
    sp = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    legs: tuple[tuple[Way, dict[str, Any]], ...] = (
        (Way(dp=2, zero=True), {"expert_model_parallel_size": 2}),
        (Way(), {}),
        (Way(dp=4, zero=True), {"expert_model_parallel_size": 4}),
        (
            Way(dp=2, tp=2),
            sp | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        ),
        (Way(dp=2, pp=2), {"expert_model_parallel_size": 2}),
        (Way(tp=2), sp | {"expert_tensor_parallel_size": 1}),
    )
    run = tmp_path / "run"
    for number, (way, options) in enumerate(legs, 1):
        document = {**EXPERTS, **way.options, **options, "exit_interval": 1}
        outcome = go(tokens, run, ranks, way.world_size, **document)
        assert outcome == ("finished" if number == len(legs) else "paused")
    expected, found = ledger(tmp_path / "whole"), ledger(run)
    assert exact(found, dict.fromkeys(FIGURES)) == exact(expected, dict.fromkeys(FIGURES))
    for one, other in zip(found, expected, strict=True):
        assert one["lm_loss"] == pytest.approx(other["lm_loss"], rel=FP32_LAYOUT.loss)
        assert one["more_losses"] == pytest.approx(other["more_losses"], rel=1e-4)
        assert one["layer_figures"] == pytest.approx(other["layer_figures"], rel=1e-6)
    for layer, loads in expected[-1]["layer_loads"].items():
        assert found[-1]["layer_loads"][layer] == pytest.approx(loads, rel=1e-6)
