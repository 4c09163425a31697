"""Resuming a hybrid on other ranks: the parts of Mamba-2's parameters are put together anew."""

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

HYBRID: dict[str, Any] = {
    "model_type": "mamba",
    "hybrid_layer_pattern": "MM*-",
    "mamba_state_dim": 4,
    "mamba_head_dim": 8,
    "mamba_num_groups": 4,
    "mamba_chunk_size": 8,
    "position_embedding_type": "none",
    "check_weight_hash_across_dp_replicas_interval": 1,
}
SP = {"sequence_parallel": True}


def test_a_hybrid_travels_over_layouts(ranks: RankPool, tmp_path: Path) -> None:
    tokens = write_pair(tmp_path / "t", [60] * 60)
    assert go(tokens, tmp_path / "whole", **HYBRID) == "finished"
    legs: tuple[tuple[Way, dict[str, Any]], ...] = (
        (Way(tp=2), SP),
        (Way(), {}),
        (Way(tp=4), {}),
        (Way(pp=2, dp=2, zero=True), {}),
        (Way(dp=4, zero=True), {}),
        (Way(dp=2, tp=2), SP),
    )
    run = tmp_path / "run"
    for number, (way, options) in enumerate(legs, 1):
        document = {**HYBRID, **way.options, **options, "exit_interval": 1}
        outcome = go(tokens, run, ranks, way.world_size, **document)
        assert outcome == ("finished" if number == len(legs) else "paused")
    expected, found = ledger(tmp_path / "whole"), ledger(run)
    assert exact(found, dict.fromkeys(COMPUTED)) == exact(expected, dict.fromkeys(COMPUTED))
    for one, other in zip(found, expected, strict=True):
        assert one["lm_loss"] == pytest.approx(other["lm_loss"], rel=FP32_LAYOUT.loss)
