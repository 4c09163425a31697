"""`reshard` rewrites a checkpoint without changing a number, and refuses what it cannot write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.reshard.config import ReshardConfig
from stages.reshard.run import run
from tests.stages.directly import run_directly
from tests.trainyard.checkpoint.samples import random_gpt, save, save_gpt, some_tensors
from trainyard.checkpoint.gpt import load_gpt
from trainyard.checkpoint.load import find_steps, open_checkpoint
from trainyard.errors import ConfigError
from trainyard.models.config import GPTConfig

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
    loaded = load_gpt(str(tmp_path / "out"))
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
    ("options", "words"),
    [
        ({"num_shards": 0}, "--num-shards must be at least 1"),
        ({"save_dir": "run"}, "lie in one another"),
        ({"save_dir": "run/out"}, "lie in one another"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    values = {"load_dir": "run", "save_dir": "out", **options}
    with pytest.raises(ConfigError, match=words):
        ReshardConfig(**values)


def test_a_model_that_transformers_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    odd = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=16, swiglu=True)
    save_gpt(str(tmp_path / "run"), random_gpt(odd))
    with pytest.raises(ConfigError, match=r"--saver hf.*--swiglu"):
        reshard(tmp_path / "run", tmp_path / "out", saver="hf")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_checkpoint_is_named_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"--load-dir .*no checkpoint there; found notes\.txt"):
        reshard(tmp_path, tmp_path.parent / "elsewhere")


@pytest.mark.slow
def test_the_command_line_exports_once_and_then_has_nothing_to_do(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    command = [
        *(sys.executable, "-m", "stages.reshard", "--load-dir", str(tmp_path / "run")),
        *("--save-dir", str(tmp_path / "export"), "--saver", "hf", "--num-shards", "2"),
    ]
    first, second = (subprocess.run(command, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert "running because there is no manifest yet" in first.stderr
    assert second.returncode == 0, second.stderr
    assert "nothing to do" in second.stderr
    manifest = json.loads((tmp_path / "export" / "manifest.json").read_text())
    listed = {record["path"] for record in manifest["files"]}
    assert {"config.json", "generation_config.json", "model-00001-of-00002.safetensors"} <= listed
    assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"} <= listed


def test_weights_that_are_not_ours_are_not_mixed_with_an_export(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    (tmp_path / "export").mkdir()
    (tmp_path / "export/model.safetensors").write_bytes(b"of somebody else")
    with pytest.raises(ConfigError, match=r"holds model\.safetensors"):
        reshard(tmp_path / "run", tmp_path / "export", saver="hf", num_shards=3)
