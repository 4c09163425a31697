"""`reshard` rewrites a checkpoint without changing a number, and refuses what it cannot write."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.reshard.config import ReshardConfig
from stages.reshard.run import run
from stages.runtime.context import StageRun
from tests.stages.directly import run_directly, run_process
from tests.stages.pretrain_runs import Pretrain, ledger
from tests.trainyard.checkpoint.hostile import edited
from tests.trainyard.checkpoint.samples import random_gpt, save, save_gpt, some_tensors
from tests.trainyard.conversion.huggingface.hf_models import make
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.model import load_model
from trainyard.checkpoint.steps import find_steps
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.config import GPTConfig

GPT = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=16,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
)
UNTIED = replace(GPT, untie_embeddings_and_output_weights=True)
GPT2 = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=16)
META = {"saver": "llama_mistral", "saver_checkpoint_type": "meta"}


def reshard(load_dir: Path, save_dir: Path, **options: Any) -> dict[str, Any]:
    return run_directly(
        ReshardConfig, run, load_dir=str(load_dir), save_dir=str(save_dir), **options
    )


def contents(folder: Path) -> dict[str, bytes]:
    paths = [p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


def test_resharding_and_back_gives_the_same_bytes(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    reshard(tmp_path / "run", tmp_path / "three", num_shards=3)
    reshard(tmp_path / "three", tmp_path / "one", num_shards=1)
    reshard(tmp_path / "one" / "iter_0000050", tmp_path / "again", num_shards=3)
    one, three = contents(tmp_path / "one"), contents(tmp_path / "three")
    assert one == contents(tmp_path / "run")
    assert three == contents(tmp_path / "again")
    assert one.keys() != three.keys()
    names = [name.rpartition("/")[2] for name in three]
    assert {f"optimizer-{k:05d}-of-00003.safetensors" for k in (1, 2, 3)} <= set(names)
    digests = {name: open_checkpoint(str(tmp_path / name)).digest for name in ("run", "one")}
    assert digests["run"] == digests["one"]


def test_a_resharded_checkpoint_is_loaded_like_any_other(tmp_path: Path) -> None:
    model = random_gpt(GPT)
    save_gpt(str(tmp_path / "run"), model, step=50)
    save_gpt(str(tmp_path / "run"), random_gpt(GPT, seed=2), step=100)
    metrics = reshard(tmp_path / "run" / "iter_0000050", tmp_path / "out", num_shards=2)
    assert metrics["step"] == 50
    assert find_steps(str(tmp_path / "out")) == [50]
    loaded = load_model(str(tmp_path / "out"))
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens), model(tokens))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the yard")) == "the yard"


def test_tensors_in_several_pieces_become_whole(tmp_path: Path) -> None:
    tensors = some_tensors()
    save(str(tmp_path / "run"), tensors, shard_size_bytes=100)
    reshard(tmp_path / "run", tmp_path / "out", num_shards=2)
    before, after = open_checkpoint(str(tmp_path / "run")), open_checkpoint(str(tmp_path / "out"))
    assert any(len(entry.pieces) > 1 for entry in before.index.values())
    assert all(len(entry.pieces) == 1 for entry in after.index.values())
    assert all(torch.equal(after.read(name), tensors[name]) for name in tensors)
    assert after.names() == before.names()


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (replace(GPT2, swiglu=True), {"saver": "hf"}, r"--saver hf.*--swiglu"),
        (GPT2, {"saver": "llama_mistral"}, "is a GPT2LMHeadModel.*use --saver hf"),
        (GPT2, META, "Meta's files cannot hold a model with .*no --swiglu"),
    ],
)
def test_unsupported_model_is_refused_before_any_output(
    tmp_path: Path, model: GPTConfig, options: dict[str, str], words: str
) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(model))
    with pytest.raises(ConfigError, match=words):
        reshard(tmp_path / "run", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_saver_of_llamas_writes_what_transformers_loads(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "llama"), random_gpt(GPT))
    for saver in ("llama_mistral", "hf"):
        reshard(tmp_path / "llama", tmp_path / saver, saver=saver)
    written, expected = contents(tmp_path / "llama_mistral"), contents(tmp_path / "hf")
    assert "LlamaForCausalLM" in written["config.json"].decode()
    for name in ("config.json", "model.safetensors"):
        assert written[name] == expected[name]


def test_a_folder_without_a_checkpoint_is_named_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"--load-dir .*no checkpoint there; found notes\.txt"):
        reshard(tmp_path, tmp_path.parent / "elsewhere")


def test_a_config_of_no_model_is_not_copied_though_its_manifest_vouches_for_it(
    tmp_path: Path,
) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    step = tmp_path / "run" / "iter_0000050"
    edited(step, "config.json", lambda d: d["model"].update(hidden_size=10**15))
    words = r"iter_0000050/config\.json: --hidden-size must be at most 2147483647"
    with pytest.raises(ArtifactError, match=words):
        reshard(tmp_path / "run", tmp_path / "three", num_shards=3)


@pytest.mark.slow
def test_the_command_line_exports_once_and_then_has_nothing_to_do(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    command = [
        *("stages.reshard", "--load-dir", str(tmp_path / "run"), "--save-dir"),
        *(str(tmp_path / "export"), "--saver", "hf", "--num-shards", "2"),
    ]
    assert "running because there is no manifest yet" in run_process(*command)
    assert "nothing to do" in run_process(*command)
    manifest = json.loads((tmp_path / "export" / "manifest.json").read_text())
    listed = {record["path"] for record in manifest["files"]}
    assert {"config.json", "generation_config.json", "model-00001-of-00002.safetensors"} <= listed
    assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"} <= listed


def test_weights_that_are_not_ours_are_not_mixed_with_an_export(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    (tmp_path / "export").mkdir()
    (tmp_path / "export/model.safetensors").write_bytes(b"of somebody else")
    with pytest.raises(ConfigError, match=r"has model\.safetensors"):
        reshard(tmp_path / "run", tmp_path / "export", saver="hf", num_shards=3)


EMBEDDING = "model.embedding.word_embeddings.weight"

# --- formats of others ----------------------------------------------------------------------------


def tensors(url: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint of ours."""
    with open_checkpoint(str(url)) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names("model.")}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_from_hugging_face_to_ours_and_back_is_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make("qwen3", tmp_path / "in")
    metrics = reshard(tmp_path / "in", tmp_path / "ours", num_shards=3)
    assert (metrics["step"], find_steps(str(tmp_path / "ours"))) == (0, [0])
    reshard(tmp_path / "ours", tmp_path / "out", saver="hf")
    before, after = contents(tmp_path / "in"), contents(tmp_path / "out")
    assert before.keys() == after.keys()
    for name in before.keys() - {"config.json", "generation_config.json"}:
        assert before[name] == after[name], name
    first, again = (json.loads(found["generation_config.json"]) for found in (before, after))
    assert first == again


@pytest.mark.slow
def test_resharding_the_converted_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make("llama", tmp_path / "in")
    for shards, name in enumerate(("one", "two"), start=1):
        reshard(tmp_path / "in", tmp_path / name, loader="hf", num_shards=shards)
    reshard(tmp_path / "two", tmp_path / "again")
    assert contents(tmp_path / "one") == contents(tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["core", "legacy"])
def test_through_files_of_megatron_and_back(saver: str, tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    sizes = {"target_tensor_parallel_size": 2, "target_pipeline_parallel_size": 2}
    reshard(tmp_path / "run", tmp_path / "theirs", saver=saver, **sizes)
    files = {name.partition("/")[2] for name in contents(tmp_path / "theirs") if "/" in name}
    ranks = [f"mp_rank_{tp:02d}_{pp:03d}" for tp in range(2) for pp in range(2)]
    assert {f"{rank}/model_optim_rng.pt" for rank in ranks} <= files
    reshard(tmp_path / "theirs", tmp_path / "back")
    assert_same(tensors(tmp_path / "run"), tensors(tmp_path / "back"))
    with open_checkpoint(str(tmp_path / "back")) as checkpoint:
        assert (checkpoint.step, checkpoint.config["converted"]) == (50, {"loader": "core"})
        assert checkpoint.config["model"]["position_embedding_type"] == "rope"


def test_through_a_distributed_checkpoint_and_back(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    metrics = reshard(tmp_path / "run", tmp_path / "theirs", saver="torch_dist", num_shards=2)
    assert {name.rpartition("/")[2] for name in contents(tmp_path / "theirs")} == {
        *("__0_0.distcp", "__0_1.distcp", ".metadata", "common.pt", "metadata.json"),
        "latest_checkpointed_iteration.txt",
    }
    assert (metrics["step"], metrics["files"]) == (50, 6)
    reshard(tmp_path / "theirs", tmp_path / "back")
    assert_same(tensors(tmp_path / "run"), tensors(tmp_path / "back"))
    with open_checkpoint(str(tmp_path / "back")) as checkpoint:
        assert (checkpoint.step, checkpoint.config["converted"]) == (50, {"loader": "torch_dist"})
        assert checkpoint.config["vocab_size"] == 257  # which theirs keeps, too


def test_partial_save_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a whole one of before: what says that it is whole goes first and comes last."""
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    save_gpt(str(tmp_path / "other"), random_gpt(GPT, seed=2))
    reshard(tmp_path / "run", tmp_path / "theirs", saver="torch_dist")
    ours = dict.fromkeys(contents(tmp_path / "theirs"), 0)
    monkeypatch.setattr("stages.reshard.savers.refuse_strangers", lambda *_: None)
    opened: list[str] = []
    begin = StageRun.open

    def fail_at_the_index(self: StageRun, name: str, volatile: bool = False) -> Any:
        opened.append(name)
        if name.endswith(".metadata"):
            raise OSError("the disk is full")
        return begin(self, name, volatile)

    monkeypatch.setattr(StageRun, "open", fail_at_the_index)
    with pytest.raises(OSError, match="the disk is full"):
        reshard(tmp_path / "other", tmp_path / "theirs", saver="torch_dist")
    left = contents(tmp_path / "theirs").keys()
    assert opened == ["iter_0000050/__0_0.distcp", "iter_0000050/.metadata"]
    assert ours.keys() - left == {
        "latest_checkpointed_iteration.txt",
        "iter_0000050/metadata.json",
    }
    with pytest.raises(ArtifactError, match=r"has no metadata\.json, which is written last"):
        reshard(tmp_path / "theirs/iter_0000050", tmp_path / "back")


@pytest.mark.slow
def test_from_one_format_of_others_into_another(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make("llama", tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "legacy", saver="legacy", target_tensor_parallel_size=2)
    reshard(tmp_path / "legacy", tmp_path / "core", loader="legacy", saver="core")
    reshard(tmp_path / "core", tmp_path / "out", saver="hf")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "out")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_tokenizer_and_rows_are_added(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    make("llama", tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "core", saver="core")
    assert "tokenizer" not in caplog.text
    reshard(tmp_path / "core", tmp_path / "bare")
    assert "has none and can only be trained with --finetune; give --token" in caplog.text
    caplog.clear()
    reshard(tmp_path / "core", tmp_path / "exported", saver="hf")
    assert "none is exported and AutoTokenizer will fail on this" in caplog.text
    caplog.clear()
    with open_checkpoint(str(tmp_path / "bare")) as checkpoint:
        assert not list((Path(checkpoint.url) / "tokenizer").glob("*"))
    options = {"tokenizer_model": str(tmp_path / "hf"), "make_vocab_size_divisible_by": 100}
    reshard(tmp_path / "core", tmp_path / "dressed", **options)
    assert "tokenizer" not in caplog.text
    loaded = load_model(str(tmp_path / "dressed"))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the yard")) == "the yard"
    rows = loaded.model.state_dict()["embedding.word_embeddings.weight"]
    assert rows.shape[0] == 300 == loaded.config.padded_vocab_size(257)
    with pytest.raises(ConfigError, match=r"--make-voc.* and --tokenizer-model cannot be applied"):
        reshard(tmp_path / "bare", tmp_path / "no", **options)


def test_a_tokenizer_of_numbers_needs_no_file(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    reshard(tmp_path / "run", tmp_path / "core", saver="core")
    numbers = {"tokenizer_type": "NullTokenizer", "vocab_size": 200}
    reshard(tmp_path / "core", tmp_path / "out", **numbers)
    tokenizer = load_model(str(tmp_path / "out")).tokenizer
    assert (tokenizer.encode("3 141 59"), tokenizer.eod) == ([3, 141, 59], 199)
    with pytest.raises(ConfigError, match=r"the tokenizer: 2000 tokens, but .* has rows for"):
        reshard(tmp_path / "core", tmp_path / "no", **{**numbers, "vocab_size": 2000})


def test_target_sizes_choose_num_shards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    caplog.set_level(logging.INFO)
    sizes = {"target_tensor_parallel_size": 2, "target_pipeline_parallel_size": 2}
    reshard(tmp_path / "run", tmp_path / "out", **sizes)
    assert "loads at any layout of ranks without resharding" in caplog.text
    assert len(list((tmp_path / "out/iter_0000050").glob("model-*"))) == 4


@pytest.mark.parametrize(("saver", "word"), [("trainyard", "mp_rank_00"), ("core", "latest_check")])
def test_foreign_files_are_not_overwritten(saver: str, word: str, tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    reshard(tmp_path / "run", tmp_path / "theirs", saver="core")
    before = contents(tmp_path / "theirs")
    (tmp_path / "theirs/manifest.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=f"has .*{word}.*choose an empty folder"):
        reshard(tmp_path / "run", tmp_path / "theirs", saver=saver)
    assert contents(tmp_path / "theirs") == before


@pytest.mark.slow
def test_a_wrong_loader_names_the_format_found(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make("llama", tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"--load-dir .* Hugging Face folder; leave --loader out"):
        reshard(tmp_path / "hf", tmp_path / "out", loader="trainyard")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_converted_llama_trains_on(pretrain: Pretrain, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make("llama for training", tmp_path / "hf")
    command = [
        *("stages.reshard", "--load-dir", str(tmp_path / "hf")),
        *("--save-dir", str(tmp_path / "ours"), "--loader", "llama_mistral"),
        *("--model-type", "GPT", "--model-size", "llama3", "--checkpoint-type", "hf"),
    ]
    assert "nothing to do" not in run_process(*command)
    assert "nothing to do" in run_process(*command)
    model = {
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "max_position_embeddings": 64,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0,
        "attention_dropout": 0,
    }
    begun = {**model, "load": str(tmp_path / "ours"), "finetune": True}
    log = pretrain(tmp_path / "on", **begun)
    assert "step 0 of" in log
    losses = [line["lm_loss"] for line in ledger(tmp_path / "on")]
    assert losses[-1] < losses[0]
    # A step of next to nothing leaves its weights, which random ones would not be.
    still = {**begun, "lr": 1e-12, "weight_decay": 0, "train_iters": 1}
    pretrain(tmp_path / "still", **still)
    begin, end = tensors(tmp_path / "ours"), tensors(tmp_path / "still")
    assert all(torch.allclose(begin[name], end[name], atol=1e-9) for name in begin)
    assert not torch.allclose(tensors(tmp_path / "on")[EMBEDDING], begin[EMBEDDING], atol=1e-3)
