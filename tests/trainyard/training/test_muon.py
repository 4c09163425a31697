"""Muon in whole runs: it learns faster than AdamW, and resumes under other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import certificate, go, ledger
from tests.trainyard.training.test_elastic import FP32, Way, assert_same_run, travel
from trainyard.testing.pool import RankPool

pytestmark = pytest.mark.slow

LICENSE = Path(__file__).parents[3] / "LICENSE"
MUON: dict[str, Any] = {
    "optimizer": "muon",
    "muon_use_nesterov": True,
    "muon_extra_scale_factor": 0.2,
}


def test_it_learns_a_text_faster_than_adamw_at_its_best_rate(tmp_path: Path) -> None:
    """Bytes of the license, 150 steps: here 1.8 beside 2.3."""
    tokens = write_tokens(tmp_path / "t", [[np.frombuffer(LICENSE.read_bytes(), np.uint8) % 128]])
    options: dict[str, Any] = {
        **{"num_layers": 2, "hidden_size": 64, "seq_length": 32, "vocab_size": 128},
        **{"micro_batch_size": 16, "train_iters": 150, "eval_iters": 0, "lr_warmup_iters": 5},
        **{"lr_decay_style": "constant", "hidden_dropout": 0.0, "adam_eps": 1e-8},
        "init_method_std": 0.02,
    }

    def reached(name: str, **more: Any) -> float:
        assert go(tokens, tmp_path / name, **options, **more) == "finished"
        return float(np.mean([line["lm_loss"] for line in ledger(tmp_path / name)[-10:]]))

    adamw = min(reached(f"adam-{lr}", lr=lr) for lr in (1e-3, 2e-3, 4e-3))
    assert reached("muon", lr=0.01, **MUON) < adamw - 0.2


@pytest.mark.distributed
@pytest.mark.parametrize(
    "ways",
    [
        (Way(dp=2, zero=True), Way(), Way(dp=4, zero=True)),
        (Way(tp=2), Way(dp=2, tp=2, zero=True, sequence_parallel=True), Way(pp=2)),
    ],
    ids=["dp", "tp, pp"],
)
@pytest.mark.parametrize("tp_mode", ["duplicated", "distributed"])
def test_a_run_resumes_under_other_layouts(
    ways: tuple[Way, ...], tp_mode: str, ranks: RankPool, tmp_path: Path
) -> None:
    tokens = write_pair(tmp_path / "t", [60] * 60)
    options = {**MUON, "muon_tp_mode": tp_mode}
    assert go(tokens, tmp_path / "whole", **options) == "finished"
    travel(tokens, tmp_path / "run", ways, ranks, **options)
    assert_same_run(tmp_path / "run", tmp_path / "whole", FP32)
    assert certificate(tmp_path / "run").is_complete
