"""`--load` of a checkpoint of Megatron-LM or Hugging Face, as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.reshard.config import ReshardConfig
from stages.reshard.run import run as reshard
from tests.stages.directly import run_directly
from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import certificate, go, ledger
from trainyard.errors import ConfigError
from trainyard.testing.pool import RankPool

LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "train_iters": 4,
    "lr_decay_iters": 6,
}
ON: dict[str, Any] = {**LLAMA, "train_iters": 6}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("tokens") / "t", [60] * 60)


@pytest.fixture(scope="module")
def run(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    assert go(tokens, folder, **LLAMA) == "finished"
    return folder


def converted(run: Path, folder: Path, saver: str, **options: Any) -> str:
    given = {"load_dir": str(run), "save_dir": str(folder), "saver": saver, **options}
    run_directly(ReshardConfig, reshard, **given)
    return str(folder)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["lm_loss"]) for line in ledger(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["torch_dist", "core"])
def test_a_run_of_megatron_goes_on_with_its_optimizer(
    saver: str, tokens: str, run: Path, tmp_path: Path
) -> None:
    assert go(tokens, tmp_path / "ours", **ON, load=str(run)) == "finished"
    theirs = converted(run, tmp_path / saver, saver)
    assert go(tokens, tmp_path / "on", **ON, load=theirs) == "finished"
    assert losses(tmp_path / "on") == losses(tmp_path / "ours")
    proof = certificate(tmp_path / "on")
    assert proof.is_proven, proof.sentence


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_take_their_parts_of_it(
    tokens: str, run: Path, tmp_path: Path, ranks: RankPool
) -> None:
    theirs = converted(run, tmp_path / "core", "core", target_tensor_parallel_size=2)
    sharded = {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True}
    for name, load in (("ours", str(run)), ("theirs", theirs)):
        go(tokens, tmp_path / name, ranks, 4, **ON, **sharded, load=load)
    assert losses(tmp_path / "theirs") == losses(tmp_path / "ours")


@pytest.mark.slow
def test_weights_of_hugging_face_begin_a_run(tokens: str, run: Path, tmp_path: Path) -> None:
    theirs = converted(run, tmp_path / "hf", "hf")
    begun = {**ON, "finetune": True}
    assert go(tokens, tmp_path / "ours", **begun, load=str(run)) == "finished"
    assert go(tokens, tmp_path / "on", **begun, load=theirs) == "finished"
    assert losses(tmp_path / "on") == losses(tmp_path / "ours")
    with pytest.raises(ConfigError, match="has weights only"):
        go(tokens, tmp_path / "whole", **ON, load=theirs)
    with pytest.raises(ConfigError, match=r"holds another model: --num-layers \(2; in it 4\)"):
        go(tokens, tmp_path / "other", **{**begun, "num_layers": 2}, load=theirs)
