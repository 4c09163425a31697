"""A run sharded by TP and PP equals one of one process, is readable, and resumes elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.evaluate.config import EvaluateConfig
from stages.evaluate.run import run as run_evaluate
from stages.reshard.config import ReshardConfig
from stages.reshard.run import run as run_reshard
from tests.stages.directly import run_directly, run_process
from tests.stages.pretrain_runs import arguments, ledger
from tests.trainyard.datasets.test_gpt import write_pair
from trainyard.artifacts import store
from trainyard.checkpoint.load import open_checkpoint
from trainyard.testing.tolerances import BF16_LAYOUT

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "seq_length": 16,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "train_iters": 4,
    "eval_iters": 0,
    "bf16": True,
    "lr": 0.001,
    "save_interval": 2,
}
CUT = {
    "nproc_per_node": 4,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 2,
}


def pretrain(tokens: str, save: Path, expect: int = 0, **options: Any) -> str:
    return run_process(
        "stages.pretrain", *arguments(tokens, save, **options), expect=expect, seconds=250
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the same options: cut over four ranks, and on one."""
    root = tmp_path_factory.mktemp("cut")
    tokens = write_pair(root / "t", [60] * 40)
    log = pretrain(tokens, root / "cut", **MODEL, **CUT)
    assert log.count("attention backend=") == 1, "one rank tells it for all"
    pretrain(tokens, root / "alone", **MODEL)
    return root


def test_sharded_weights_equal_those_of_one_process(runs: Path) -> None:
    with open_checkpoint(str(runs / "cut")) as cut, open_checkpoint(str(runs / "alone")) as alone:
        assert {n: cut.spec(n) for n in cut.names()} == {n: alone.spec(n) for n in alone.names()}
        assert any(name.startswith("optimizer.param.") for name in cut.names())
        for name in cut.names("optimizer.param."):
            # Adam makes of what is next to no gradient a step of the size of any other.
            moved = (cut.read(name) - alone.read(name)).abs().mean()
            assert moved < 0.001, name
    for one, other in zip(ledger(runs / "cut"), ledger(runs / "alone"), strict=True):
        assert one["lm_loss"] == pytest.approx(other["lm_loss"], rel=BF16_LAYOUT.loss)
        assert one["samples"] == other["samples"]
        assert one["rng"] == other["rng"]


def test_tools_read_a_sharded_checkpoint(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    run_directly(
        ReshardConfig, run_reshard, load_dir=str(runs / "cut"), save_dir=str(folder), num_shards=3
    )
    with open_checkpoint(str(runs / "cut")) as before, open_checkpoint(str(folder)) as after:
        assert before.names() == after.names()
        assert all(before.read(name).equal(after.read(name)) for name in before.names())
    held = tmp_path / "held.txt"
    held.write_text(" ".join(str(n % 50) for n in range(200)))

    def perplexity(checkpoint: Path, out: str) -> float:
        options = {"load": str(checkpoint), "valid_data": [str(held)], "task": "WIKITEXT103"}
        options |= {"output_dir": str(tmp_path / out), "device": "cpu"}
        run_directly(EvaluateConfig, run_evaluate, **options, overlapping_eval=8)
        document: dict[str, Any] = store.read_json(str(tmp_path / out / "results.json"))
        return float(document["sets"][0]["ppl"])

    whole = perplexity(runs / "cut", "a")
    assert perplexity(folder, "b") == whole
    assert perplexity(runs / "alone", "c") == pytest.approx(whole, rel=0.01)


def test_a_run_resumes_under_another_parallel_layout(runs: Path, tmp_path: Path) -> None:
    tokens, folder = str(runs / "t"), tmp_path / "run"
    pretrain(tokens, folder, **MODEL, **CUT, exit_interval=2, expect=143)
    log = pretrain(tokens, folder, **MODEL)
    assert "resuming from step 2" in log
    for one, other in zip(ledger(folder), ledger(runs / "cut"), strict=True):
        assert one["lm_loss"] == pytest.approx(other["lm_loss"], rel=BF16_LAYOUT.loss)
