"""`reshard` writes the files of Meta's program, and reads them again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.reshard.config import ReshardConfig
from tests.stages.directly import Done, run_program
from tests.stages.test_reshard import GPT, contents, reshard
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from trainyard.checkpoint.load import open_checkpoint
from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig

META = {"saver": "llama_mistral", "saver_checkpoint_type": "meta"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"saver_checkpoint_type": "meta"}, "--saver-checkpoint-type meta is of --saver llama_mis"),
        ({**META, "num_shards": 2}, "--num-shards 2: Meta's layout has one file for each tensor"),
        ({**META, "target_pipeline_parallel_size": 2}, "-size 2: Meta's layout has all layers in"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ReshardConfig(load_dir="run", save_dir="out", **options)


def test_through_the_files_of_meta_and_back(tmp_path: Path) -> None:
    untied = replace(GPT, untie_embeddings_and_output_weights=True)
    save_gpt(str(tmp_path / "run"), random_gpt(untied))
    reshard(tmp_path / "run", tmp_path / "meta", target_tensor_parallel_size=2, **META)
    assert {path.name for path in (tmp_path / "meta").iterdir()} == {
        *("consolidated.00.pth", "consolidated.01.pth", "params.json", "tokenizer.json")
    }
    reshard(tmp_path / "meta", tmp_path / "ours")
    before, after = open_checkpoint(str(tmp_path / "run")), open_checkpoint(str(tmp_path / "ours"))
    names = before.names("model.")
    assert after.names("model.") == names
    assert all(torch.equal(after.read(name), before.read(name)) for name in names)
    assert (after.config["vocab_size"], after.config["padded_vocab_size"]) == (257, 384)


def test_rows_are_padded_anew_for_the_files_of_meta(tmp_path: Path) -> None:
    llama3 = replace(GPT, rotary_base=500000.0, untie_embeddings_and_output_weights=True)
    save_gpt(str(tmp_path / "run"), random_gpt(llama3))
    cut = {"target_tensor_parallel_size": 2, "make_vocab_size_divisible_by": 1}
    reshard(tmp_path / "run", tmp_path / "meta", **cut, **META)
    assert json.loads((tmp_path / "meta/params.json").read_text())["vocab_size"] == 258
    for rank in range(2):
        file = torch.load(tmp_path / f"meta/consolidated.{rank:02d}.pth", weights_only=True)
        assert file["tok_embeddings.weight"].shape == file["output.weight"].shape == (129, 16)


def test_files_of_meta_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    gpt2 = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=16)
    save_gpt(str(tmp_path / "gpt2"), random_gpt(gpt2))
    with pytest.raises(ConfigError, match=r"Meta's files cannot hold this model.*no --swiglu"):
        reshard(tmp_path / "gpt2", tmp_path / "out", **META)
    assert not (tmp_path / "out").exists()
    save_gpt(str(tmp_path / "llama"), random_gpt(GPT))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/params.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds params\.json, which this stage did not write"):
        reshard(tmp_path / "llama", tmp_path / "out", **META)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["params.json"]


@pytest.mark.slow
def test_the_command_line_writes_the_files_of_meta(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "tied"), random_gpt(GPT))
    untied = replace(GPT, untie_embeddings_and_output_weights=True)
    save_gpt(str(tmp_path / "run"), random_gpt(untied))

    def command(source: str, ranks: int, expect: int) -> Done:
        return run_program(
            *("stages.reshard", "--load-dir", str(tmp_path / source)),
            *("--save-dir", str(tmp_path / "meta"), "--saver", "llama_mistral"),
            *("--saver-checkpoint-type", "meta", "--target-tensor-parallel-size", str(ranks)),
            expect=expect,
        )

    for ranks in (2, 1):  # into one folder, where nothing of the other stays
        done = command("run", ranks, expect=0)
        assert "params.json does not tell the longest sequence, which is 16 here" in done.err
        files = {path.name for path in (tmp_path / "meta").glob("consolidated.*")}
        assert files == {f"consolidated.{rank:02d}.pth" for rank in range(ranks)}
    before = contents(tmp_path / "meta")
    refused = command("tied", 2, expect=2)
    assert "embedding and output layer of this model are one tensor" in refused.err
    assert contents(tmp_path / "meta") == before
