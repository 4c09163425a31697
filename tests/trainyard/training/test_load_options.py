"""What --load takes of a checkpoint: the model's options, weights without the optimizer, weights to
measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.pretrain import resolve
from stages.pretrain.resolve import beneath
from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import RUN, certificate, go, ledger
from trainyard.checkpoint.load import open_checkpoint
from trainyard.config import from_dict, to_dict
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.families import read_model_config
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.pretrain import pretrain

FLAT: dict[str, Any] = {"lr_decay_style": "constant", "lr_warmup_iters": 3}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("tokens") / "t", [60] * 60)


@pytest.fixture(scope="module")
def run(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    assert go(tokens, folder, **FLAT) == "finished"
    return folder


# --- --use-checkpoint-args ----------------------------------------------------------------------


@pytest.mark.slow
def test_the_model_comes_from_the_checkpoint_under_the_command_line(run: Path) -> None:
    given = {"use_checkpoint_args": True, "load": str(run), "num_layers": 2, "seq_length": 16}
    taken, remarks = beneath({**given, "tokenizer_type": "NullTokenizer"})
    assert (taken["hidden_size"], taken["num_attention_heads"]) == (32, 4)
    assert not given.keys() & taken.keys()
    assert "lr" not in taken, "options of the model alone"
    assert remarks == [
        f"--use-checkpoint-args: {len(taken)} options of the model are those of {run}",
        f"--use-checkpoint-args: --num-layers 2 replaces 4 of {run}",
    ]
    same = {"use_checkpoint_args": True, "save": str(run)}
    found, remarks = beneath(same)
    assert found.items() >= taken.items()
    assert found["tokenizer_type"] == "NullTokenizer"
    assert remarks[-1] == f"--use-checkpoint-args: the tokenizer is that of {run}"
    assert beneath({"load": str(run)}) == ({}, [])


PARTS: dict[str, dict[str, Any]] = {
    "latents": {"multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 8},
    "experts": {"num_experts": 4, "moe_layer_freq": "[0,1]", "moe_router_topk": 1},
    "gpt-oss": {"softmax_type": "learnable", "position_embedding_type": "yarn"},
    "predictions": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3},
    "hybrid": {"model_type": "mamba", "hybrid_layer_pattern": "M*", "mamba_num_groups": 2},
}
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16}


@pytest.mark.parametrize("part", PARTS)
def test_every_option_of_every_kind_of_model_comes_from_the_checkpoint(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {**SIZES, "position_embedding_type": "rope", "moe_router_pre_softmax": True}
    model = read_model_config({**document, **PARTS[part]}, "test")
    monkeypatch.setattr(resolve, "_stored", lambda load: to_dict(model))
    given = {"use_checkpoint_args": True, "load": "c", "tokenizer_type": "NullTokenizer"}
    taken, remarks = beneath(given)
    assert taken == to_dict(model)
    assert taken.items() >= PARTS[part].items()
    assert len(remarks) == 1
    _, remarks = beneath({**given, "moe_router_topk": 3, "window_size": "4,0"})
    assert [line.partition(": ")[2] for line in remarks[1:]] == [
        f"--moe-router-topk 3 replaces {taken['moe_router_topk']} of c",
        "--window-size 4,0 replaces no value of c",
    ]


def test_before_the_first_checkpoint_the_options_are_those_given(tmp_path: Path) -> None:
    save = str(tmp_path / "new")
    for given in ({"save": save}, {"save": save, "load": save}):
        taken, remarks = beneath({"use_checkpoint_args": True, **given})
        assert taken == {}
        assert remarks == [
            f"--use-checkpoint-args: {save} has no checkpoint yet; the options are those given"
        ]


def test_a_program_of_another_kind_of_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_stored", lambda load: {"model_type": "mamba"})
    with pytest.raises(ConfigError, match="c holds a model of --model-type mamba, not gpt"):
        beneath({"use_checkpoint_args": True, "load": "c", "model_type": "gpt"})


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "from --load, which is not given"), ({"load": "none"}, "--use-checkpoint-args: --load")],
)
def test_without_a_checkpoint_there_is_no_model(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ArtifactError), match=message):
        beneath({"use_checkpoint_args": True, **given})


# --- --no-load-optim ----------------------------------------------------------------------------


@pytest.mark.slow
def test_without_the_optimizer_its_state_starts_over_and_the_data_goes_on(
    tokens: str, run: Path, tmp_path: Path
) -> None:
    options = {**FLAT, "load": str(run), "load_optim": False, "train_iters": 9, "save_interval": 8}
    with open_checkpoint(str(run)) as before:
        weights = {name: before.read(name) for name in before.names("model.")}
    assert go(tokens, tmp_path / "on", **options, exit_interval=7) == "paused"
    with open_checkpoint(str(tmp_path / "on")) as first:
        assert (first.state["num_updates"], first.state["scheduled_samples"]) == (1, 16)
        # A first step of Adam without a past, at the rate that the warm-up begins with: 0.
        for name, weight in weights.items():
            assert first.read(name).equal(weight), name
    assert go(tokens, tmp_path / "on", **options) == "finished"
    lines = ledger(tmp_path / "on")
    assert [line["consumed_train_samples"] for line in lines] == [112, 128, 144]
    rates = [line["learning_rate"] for line in lines]
    assert rates == [line["learning_rate"] for line in ledger(run)][:3]
    proof = certificate(tmp_path / "on")
    assert proof.is_proven, proof.sentence


def test_no_load_optim_needs_load(tokens: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="--no-load-optim: takes the rest from --load, which is not"
    ):
        go(tokens, tmp_path / "run", load_optim=False)


# --- --skip-train -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("place", ["save", "load"])
def test_skip_train_measures_and_changes_nothing(
    place: str, tokens: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    options = {**RUN, **FLAT, "data_path": [tokens], place: str(run), "skip_train": True}
    options |= {"split": "80,10,10", "eval_interval": 6}
    result = pretrain(None, None, from_dict(PretrainConfig, options))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    out = capsys.readouterr().out
    assert "validation loss at iteration 6" in out
    assert "on test set" in out
    assert " iteration        " not in out
    assert result.metrics.keys() >= {"validation_loss", "test_loss"}
    given = {**RUN, **FLAT, "data_path": [tokens], "load": str(run), "skip_train": True}
    again = pretrain(None, None, from_dict(PretrainConfig, given))
    (last,) = [line for line in ledger(run) if line["step"] == 6]
    first = [line["validation_loss"] for line in ledger(run) if "validation_loss" in line]
    assert again.metrics["validation_loss"] == pytest.approx(last["validation_loss"], rel=0.1)
    assert again.metrics["validation_loss"] not in first, "the first batch, with the last weights"


def test_skip_train_needs_something_to_measure(tokens: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--skip-train measures nothing with --eval-iters 0"):
        go(tokens, tmp_path / "run", skip_train=True, eval_iters=0)
