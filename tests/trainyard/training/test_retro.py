"""A Retro trained from a chunk database and tables of neighbours: options that apply, a resumed run
equal to an undisturbed one, a start from a GPT, and another database refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.reshard.config import ReshardConfig
from stages.reshard.run import run as run_reshard
from tests.stages.directly import run_directly
from tests.trainyard.retrieval.corpora import LENGTH
from tests.trainyard.retrieval.samples import SEQ_LENGTH, Yard, make_yard
from tests.trainyard.retrieval.tables import database_digest, random_table, write_table
from tests.trainyard.training.resumed_runs import RUN, certificate, digest, go, ledger
from trainyard.checkpoint.model import load_model
from trainyard.config import from_dict
from trainyard.errors import ConfigError
from trainyard.models.retro.chunks import Neighbors
from trainyard.testing.pool import RankPool
from trainyard.training.options.pretrain import PretrainConfig

GPT: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": SEQ_LENGTH,
    "tokenizer_type": "ByteLevelTokenizer",
    "vocab_size": None,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 6,
    "eval_interval": 3,
    "eval_iters": 1,
    "save_interval": 2,
    "hidden_dropout": 0.1,
}
RETRO: dict[str, Any] = {
    **GPT,
    "model_type": "retro",
    "retro_chunk_length": LENGTH,
    "retro_cross_attention_layers": [2],
}


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    """The same blend, split and length as the options above say."""
    yard = make_yard(tmp_path_factory.mktemp("retro"))
    yard.options.update({"eval_interval": 3})
    for seed, split in enumerate(("train", "valid")):
        write_table(yard, split, random_table(yard, split, 3, seed))
    return yard


def where(yard: Yard) -> dict[str, Any]:
    """Options of the data."""
    return {"data_path": list(yard.options["data_path"]), "split": yard.options["split"]}


def neighbors(yard: Yard) -> dict[str, Any]:
    return {
        "retro_db": str(yard.folder / "db"),
        "retro_train_neighbors": str(yard.folder / "neighbors-train"),
        "retro_valid_neighbors": str(yard.folder / "neighbors-valid"),
    }


def train(yard: Yard, save: Path, **options: Any) -> str:
    return go("", save, **RETRO | where(yard) | neighbors(yard) | options)


@pytest.mark.slow
def test_a_killed_and_resumed_retro_equals_an_undisturbed_one(yard: Yard, tmp_path: Path) -> None:
    assert train(yard, tmp_path / "whole") == "finished"
    assert train(yard, tmp_path / "parts", dies_after=3, num_workers=1) == "died"
    assert train(yard, tmp_path / "parts") == "finished"
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    assert ledger(tmp_path / "whole")[-1]["validation_loss"] > 0

    loaded = load_model(str(tmp_path / "whole"), model_type="retro")
    document = loaded.checkpoint.config["inputs"]
    assert document["retro_db"] == database_digest(yard)
    tokens = torch.full((1, SEQ_LENGTH), 97)
    rows = Neighbors(torch.full((1, 4, 2, 2 * LENGTH), 98), torch.full((1, 4, 2), 2 * LENGTH))
    assert not torch.equal(loaded.model(tokens), loaded.model(tokens, neighbors=rows))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_step_resumes_over_other_ranks(yard: Yard, tmp_path: Path, ranks: RankPool) -> None:
    assert train(yard, tmp_path / "one") == "finished"
    save = tmp_path / "many"
    assert train(yard, save, dies_after=2) == "died"
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    layout |= {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
    assert train(yard, save, ranks=ranks, world_size=4, **layout) == "finished"
    losses = [[line["lm_loss"] for line in ledger(tmp_path / n)] for n in ("one", "many")]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.slow
def test_retro_fitting_begins_with_the_weights_of_a_gpt(
    yard: Yard, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpt, save = tmp_path / "gpt", tmp_path / "retro"
    assert go("", gpt, **GPT | where(yard)) == "finished"
    with pytest.raises(
        ConfigError, match=r"holds a gpt, from which no --model-type retro can resu"
    ):
        train(yard, save, load=str(gpt))
    caplog.set_level("INFO")
    # A learning rate of 0: the weights of the GPT stay as they are.
    still = {"lr": 0.0, "min_lr": 0.0, "weight_decay": 0.0}
    assert train(yard, save, load=str(gpt), finetune=True, **still) == "finished"
    assert "is a gpt: its weights are taken, and those that a retro has beside them" in caplog.text
    theirs, ours = (load_model(str(folder)).model.state_dict() for folder in (gpt, save))
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
    added = ours.keys() - theirs.keys()
    assert all("cross_att" in name for name in added)
    assert all(ours[name].any() for name in added if name.endswith("weight"))


@pytest.mark.slow
def test_another_database_is_refused_unless_the_first_is_named(yard: Yard, tmp_path: Path) -> None:
    first = tmp_path / "first"
    assert train(yard, first, train_iters=6, exit_interval=2) == "paused"
    # The same chunks in a database of other bytes.
    other = Yard(tmp_path / "yard", yard.prefixes, yard.options)
    shutil.copytree(yard.folder / "db", other.folder / "db")
    (other.folder / "db" / "more").write_text("bytes")
    assert database_digest(other) != database_digest(yard)
    for seed, split in enumerate(("train", "valid")):
        write_table(other, split, random_table(yard, split, 3, seed))
    more = {**neighbors(other), "load": str(first), "retro_db_data_path": yard.prefixes}
    named = database_digest(yard)[:12]
    with pytest.raises(
        ConfigError, match=f"or --retro-loaded-database {named} to continue with this"
    ):
        train(yard, tmp_path / "second", **more)
    assert train(yard, tmp_path / "second", **more, retro_loaded_database=named) == "finished"


def reshard(load_dir: Path, save_dir: Path, **options: Any) -> None:
    run_directly(
        ReshardConfig, run_reshard, load_dir=str(load_dir), save_dir=str(save_dir), **options
    )


@pytest.mark.slow
def test_other_tools_work_on_a_retro_or_say_why_not(yard: Yard, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(yard, run) == "finished"
    found = certificate(run, data_path=list(yard.options["data_path"]))
    assert found.is_proven, found.checks
    with pytest.raises(ConfigError, match="holds a retro, and this needs a gpt"):
        load_model(str(run), model_type="gpt")
    for saver, message in {
        "core": "Megatron-LM's Retro has no --retro-cross-attention-layers but every third",
        "torch_dist": "Megatron-LM's Retro has no --retro-cross-attention-layers but every third",
        "hf": "--saver hf: transformers has no Retro",
    }.items():
        with pytest.raises(ConfigError, match=message):
            reshard(run, tmp_path / saver, saver=saver)
    reshard(run, tmp_path / "split", num_shards=3)
    ours, theirs = (load_model(str(url)).model for url in (tmp_path / "split", run))
    expected = theirs.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())


def config(**options: Any) -> PretrainConfig:
    needed = {"data_path": ["x"], "save": "y", "retro_db": "d", "retro_train_neighbors": "t"}
    return from_dict(PretrainConfig, {**RUN, **RETRO, **needed, "eval_iters": 0} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mock_data": True, "data_path": []}, "--mock-data has no documents, and --mo"),
        ({"context_parallel_size": 2}, r"--context-parallel-size \(2\) does not apply wi"),
        ({"model_type": "gpt"}, "only applies with --model-type retro"),
        ({"retro_db": None}, "--retro-train-neighbors needs --retro-db"),
        ({"retro_db": None, "retro_train_neighbors": None}, "type retro needs --retro-project-dir"),
        ({"eval_iters": 1}, "--eval-iters 1 needs --retro-valid-neighbors"),
        (
            {"sequence_parallel": True, "tensor_model_parallel_size": 2, "retro_chunk_length": 1,
             "retro_num_retrieved_chunks": 3},
            r"the tokens of a neighbour \(3\) must be divisible",
        ),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_a_gpt_takes_no_neighbours() -> None:
    table = {**RUN, **GPT, "data_path": ["x"], "save": "y", "vocab_size": None}
    found = {"retro_db": "d", "retro_train_neighbors": "t"}
    with pytest.raises(ConfigError, match="--retro-db does not apply with --model-type gpt"):
        from_dict(PretrainConfig, {**table, **found})


def test_the_database_and_the_tables_are_inputs() -> None:
    found = config(retro_db_data_path=["p"]).inputs()
    assert found["retro_db"] == ("d",)
    assert found["retro_train_neighbors"] == ("t",)
    assert found["retro_db_data_0"] == ("p",)
    assert "retro_valid_neighbors" not in found
