"""`reshard` writes the files of Meta's program, and reads them again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.stages.directly import Done, run_program
from tests.stages.test_reshard import GPT, META, UNTIED, contents, reshard
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from trainyard.checkpoint.load import open_checkpoint
from trainyard.errors import ConfigError


def test_through_the_files_of_meta_and_back(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(UNTIED))
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


def test_rows_are_padded_again_for_the_files_of_meta(tmp_path: Path) -> None:
    llama3 = replace(UNTIED, rotary_base=500000.0)
    save_gpt(str(tmp_path / "run"), random_gpt(llama3))
    cut = {"target_tensor_parallel_size": 2, "make_vocab_size_divisible_by": 1}
    reshard(tmp_path / "run", tmp_path / "meta", **cut, **META)
    assert json.loads((tmp_path / "meta/params.json").read_text())["vocab_size"] == 258
    for rank in range(2):
        file = torch.load(tmp_path / f"meta/consolidated.{rank:02d}.pth", weights_only=True)
        assert file["tok_embeddings.weight"].shape == file["output.weight"].shape == (129, 16)


def test_params_of_another_program_are_kept(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "llama"), random_gpt(GPT))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/params.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has params\.json, which this stage did not write"):
        reshard(tmp_path / "llama", tmp_path / "out", **META)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["params.json"]


@pytest.mark.slow
def test_the_command_line_writes_the_files_of_meta(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "tied"), random_gpt(GPT))
    save_gpt(str(tmp_path / "run"), random_gpt(UNTIED))

    def command(source: str, ranks: int, expect: int) -> Done:
        return run_program(
            *("stages.reshard", "--load-dir", str(tmp_path / source)),
            *("--save-dir", str(tmp_path / "meta"), "--saver", "llama_mistral"),
            *("--saver-checkpoint-type", "meta", "--target-tensor-parallel-size", str(ranks)),
            expect=expect,
        )

    for ranks in (2, 1):  # into one folder, where nothing of the other stays
        done = command("run", ranks, expect=0)
        assert "params.json does not store the longest sequence, which is 16" in done.err
        files = {path.name for path in (tmp_path / "meta").glob("consolidated.*")}
        assert files == {f"consolidated.{rank:02d}.pth" for rank in range(ranks)}
    before = contents(tmp_path / "meta")
    refused = command("tied", 2, expect=2)
    assert "this model's embedding is its output layer" in refused.err
    assert contents(tmp_path / "meta") == before
