"""A run whose loader serves wrong samples ends before the step, and can resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.faulty_loaders import FAULTS, inject_loader_fault
from tests.trainyard.training.resumed_runs import RUN, certificate, go, ledger, leg
from trainyard.testing.pool import RankPool
from trainyard.training.loop.sample_check import StepMismatchError

pytestmark = pytest.mark.slow
FULL = pytest.mark.full


def faulty_leg(options: dict[str, Any], fault: str, rank: int) -> str:
    """A leg in which one data-parallel rank is given other samples."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        inject_loader_fault(monkeypatch, FAULTS[fault], "in front of the loader", rank)
        return leg(options)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("tokens") / "t", [60] * 40)


SMALL = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "global_batch_size": 8}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_stopped_by_wrong_samples_resumes_to_the_correct_result(
    fault: str, tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, save = tmp_path / "whole", tmp_path / "run"
    assert go(tokens, whole, save_interval=1, **SMALL) == "finished"
    with monkeypatch.context() as patched:
        inject_loader_fault(patched, FAULTS[fault], "in front of the loader")
        with pytest.raises(StepMismatchError, match="step 2, rank 0: row 0 of micro-batch"):
            go(tokens, save, save_interval=1, **SMALL)
        assert sorted(path.name for path in save.glob("iter_*")) == ["iter_0000001"]
        # Of the leg that goes on it is the second step again.
        with pytest.raises(StepMismatchError, match="step 3, rank 0: row 0 of micro-batch"):
            go(tokens, save, save_interval=1, **SMALL)
    assert sorted(path.name for path in save.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    assert go(tokens, save, save_interval=1, **SMALL) == "finished"
    assert ledger(save) == ledger(whole)
    assert certificate(save).is_complete


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "world_size", "rank"),
    [
        ({}, 2, 1),
        pytest.param({}, 2, 0, marks=FULL),
        pytest.param({"tensor_model_parallel_size": 2}, 4, 1, marks=FULL),
        pytest.param({"pipeline_model_parallel_size": 2}, 4, 1, marks=FULL),
        ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}, 2, 0),
        pytest.param({"context_parallel_size": 2}, 4, 0, marks=FULL),
    ],
    ids=str,
)
def test_one_rank_with_wrong_samples_ends_all_ranks_before_the_update(
    layout: dict[str, int],
    world_size: int,
    rank: int,
    tokens: str,
    tmp_path: Path,
    ranks: RankPool,
) -> None:
    save = tmp_path / "run"
    dp = world_size // max(layout.values(), default=1)
    options = {**RUN, "data_path": [tokens], "save": str(save), "save_interval": 1, **layout}
    options["global_batch_size"] = 8 * dp
    with pytest.raises(StepMismatchError, match=r"step 2, rank \d: row 0 of micro-batch 1"):
        ranks.run(faulty_leg, world_size, options, "skips", rank)
    assert sorted(path.name for path in save.glob("iter_*")) == ["iter_0000001"]
    assert ranks.run(leg, world_size, options) == ["finished"] * world_size
    assert certificate(save).is_complete
