"""`pretrain --ckpt-convert-format` converts a checkpoint to Megatron-LM's and trains nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.pretrain.config import PretrainConfig
from stages.pretrain.run import run
from stages.reshard.config import ReshardConfig
from stages.reshard.run import run as reshard
from tests.stages.directly import run_directly, run_program
from tests.stages.pretrain_runs import OPTIONS, flags
from tests.trainyard.checkpoint.samples import PADDED_VOCAB, random_gpt
from tests.trainyard.conversion.megatron.converted_runs import save_trained
from tests.trainyard.conversion.megatron.test_read import states_of, weights_of
from trainyard.artifacts.digest import digest_document
from trainyard.checkpoint.load import open_checkpoint
from trainyard.config import digest_relevant, from_dict
from trainyard.conversion.megatron.read import open_megatron
from trainyard.conversion.torch_dist.read import open_torch_dist
from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig

TOKENS = 257
GPT = GPTConfig(num_layers=4, hidden_size=16, num_attention_heads=2, seq_length=16)
OF_RUN: dict[str, Any] = {
    **{key: value for key, value in OPTIONS.items() if key not in ("num_threads", "eval_interval")},
    "num_layers": 4,
    "vocab_size": TOKENS,
    "mock_data": True,
    "split": None,
}


def options(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """Options of a run, as its own command has them, that converts the step at tmp_path/run."""
    required = {
        "save": str(tmp_path / "trained"),
        "load": str(tmp_path / "run"),
        "ckpt_convert_format": "torch_dist",
        "ckpt_convert_save": str(tmp_path / "out"),
    }
    given = {**OF_RUN, **required, **more}
    return {key: value for key, value in given.items() if value is not None}


def convert(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return run_directly(PretrainConfig, run, **options(tmp_path, **more))


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A step of a run in 16 bits, with its optimizer."""
    weights = {name: tensor.bfloat16() for name, tensor in weights_of(random_gpt(GPT)).items()}
    save_trained(tmp_path / "run", weights, states_of(weights), GPT)
    return tmp_path


@pytest.mark.slow
def test_both_formats_hold_the_checkpoint_and_nothing_is_trained(trained: Path) -> None:
    split = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    found = {kind: convert(trained, ckpt_convert_format=kind, **split) for kind in FORMATS}
    assert not (trained / "trained").exists()
    with open_checkpoint(str(trained / "run")) as run:
        for kind, open_kind in FORMATS.items():
            with open_kind(str(trained / "out" / kind)) as source:
                assert found[kind] == {"step": 100, "tensors": len(source.specs)}
                assert (source.step, source.num_updates) == (100, 98)
                # 257 tokens padded for two ranks, as these options pad them
                assert (source.vocab_size, source.padded_vocab_size) == (TOKENS, 512)
                assert {n for n in run.names() if not n.startswith("rng")} == set(source.specs)
                for name in ("model.decoder.layers.3.mlp.linear_fc1.weight", EMBEDDING):
                    assert source.read(name)[:TOKENS].equal(run.read(name)[:TOKENS])
    ranks = {path.name for path in (trained / "out/torch/iter_0000100").iterdir()}
    assert ranks == {f"mp_rank_{tp:02d}_{pp:03d}" for tp in (0, 1) for pp in (0, 1)}


FORMATS: dict[str, Any] = {"torch_dist": open_torch_dist, "torch": open_megatron}
EMBEDDING = "optimizer.exp_avg.embedding.word_embeddings.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"num_layers_per_virtual_pipeline_stage": 1},
        {"num_virtual_stages_per_pipeline_rank": 2},
        {"pipeline_model_parallel_layout": "Et|t|t|tL"},
    ],
    ids=["layers", "stages", "layout"],
)
def test_virtual_stages_are_those_of_the_run(trained: Path, layout: dict[str, Any]) -> None:
    convert(trained, ckpt_convert_format="torch", pipeline_model_parallel_size=2, **layout)
    with open_checkpoint(str(trained / "run")) as run:
        for stage, layers in enumerate([(0, 2), (1, 3)]):
            path = trained / f"out/torch/iter_0000100/mp_rank_00_{stage:03d}/model_optim_rng.pt"
            tree = torch.load(path, weights_only=False)
            assert [key for key in tree if key.startswith("model")] == ["model0", "model1"]
            for chunk, layer in enumerate(layers):
                held = tree[f"model{chunk}"]["decoder.layers.0.mlp.linear_fc1.weight"]
                assert held.equal(run.read(f"model.decoder.layers.{layer}.mlp.linear_fc1.weight"))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ({"decoder_first_pipeline_num_layers": 1}, [1, 3]),
        ({"pipeline_model_parallel_layout": "Et||ttt|L"}, [1, 0, 3, 0]),
    ],
    ids=["first", "layout"],
)
def test_uneven_stages_are_kept(trained: Path, layout: dict[str, Any], counts: list[int]) -> None:
    layout |= {"pipeline_model_parallel_size": len(counts)}
    layout |= {"make_vocab_size_divisible_by": PADDED_VOCAB}
    convert(trained, ckpt_convert_format="torch", **layout)
    for stage, count in enumerate(counts):
        path = trained / f"out/torch/iter_0000100/mp_rank_00_{stage:03d}/model_optim_rng.pt"
        tree = torch.load(path, weights_only=False)
        held = [name for name in tree["model"] if name.endswith("linear_fc1.weight")]
        assert held == [f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in range(count)]
    with (
        open_checkpoint(str(trained / "run")) as run,
        open_megatron(str(trained / "out/torch")) as found,
    ):
        assert {n for n in run.names() if not n.startswith("rng")} == set(found.specs)
        for name in (f"{kind}.decoder.layers.3.mlp.linear_fc2.bias" for kind in KINDS):
            assert found.read(name).equal(run.read(name))


KINDS = ("model", "optimizer.param", "optimizer.exp_avg", "optimizer.exp_avg_sq")


@pytest.mark.slow
def test_checkpoints_convert_between_all_formats_and_back(trained: Path) -> None:
    """ours -> torch -> torch_dist -> ours, by the options of one run."""
    alike = {"make_vocab_size_divisible_by": PADDED_VOCAB}
    convert(trained, ckpt_convert_format="torch", **alike)
    convert(trained, load=str(trained / "out/torch"), ckpt_convert_save=str(trained / "b"), **alike)
    theirs, back = str(trained / "b/torch_dist"), str(trained / "back")
    run_directly(ReshardConfig, reshard, load_dir=theirs, save_dir=back)
    with open_checkpoint(str(trained / "run")) as run, open_checkpoint(back) as found:
        assert set(run.names()) == set(found.names())
        assert found.config["vocab_size"] == TOKENS
        for name in run.names():
            left, right = run.read(name), found.read(name)
            rows = TOKENS if "embeddings" in name else None
            assert left.shape == right.shape, name
            assert left[:rows].equal(right[:rows]), name


@pytest.mark.slow
def test_the_optimizer_can_be_left_out(trained: Path) -> None:
    convert(trained, save_optim=False)
    with open_torch_dist(str(trained / "out/torch_dist")) as source:
        assert all(name.startswith("model.") for name in source.specs)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"load": None}, "--ckpt-convert-format needs --load"),
        ({"ckpt_convert_save": None}, "--ckpt-convert-format needs --ckpt-convert-save"),
        ({"ckpt_convert_format": None}, "--ckpt-convert-save needs --ckpt-convert-format"),
        ({"finetune": True}, "--finetune with --ckpt-convert-format: .*keeps its step"),
        ({"ckpt_convert_format": "zarr"}, "zarr"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_dict(PretrainConfig, options(tmp_path, **more))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"num_layers": 2, "swiglu": True},
            r"holds another model: --num-layers \(2; in it 4\), .*--swiglu \(True; in it False\)",
        ),
        ({"vocab_size": 300}, "was trained with 257 tokens, and the tokenizer has 300"),
    ],
)
def test_another_model_is_refused_early(trained: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(trained, **more)
    assert not (trained / "out").exists()


def test_only_conversions_depend_on_the_layout(tmp_path: Path) -> None:
    """As a training goes on at any layout; files of `torch` are of one."""

    def digest(**more: Any) -> str:
        return digest_document(
            digest_relevant(from_dict(PretrainConfig, options(tmp_path, **more)))
        )

    wide = {"tensor_model_parallel_size": 2}
    no_conversion = {"ckpt_convert_format": None, "ckpt_convert_save": None}
    assert digest(**no_conversion) == digest(**no_conversion, **wide)
    assert digest() != digest(**wide)
    assert digest() != digest(pipeline_model_parallel_layout="EttttL")
    assert digest() != digest(ckpt_convert_format="torch")


@pytest.mark.slow
def test_the_command_logs_the_conversion_and_a_rerun_is_a_noop(trained: Path) -> None:
    given = options(trained, train_iters=4)
    words = [*flags(given), "--ckpt-convert-update-legacy-dist-opt-format", "--nproc-per-node", "8"]
    first, second = (run_program("stages.pretrain", *words) for _ in range(2))
    assert first.status == 0, first.err
    assert "converted checkpoint: trainyard -> torch_dist step=100" in first.err
    assert "--ckpt-convert-update-legacy-dist-opt-format: ignored: " in first.err
    assert (second.status, "nothing to do" in second.err) == (0, True), second.err
