"""Number formats that `reshard` writes, and the class of Megatron-LM's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.stages.test_reshard import GPT, GPT2, reshard
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from trainyard.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_weights_are_written_in_the_number_format(
    tmp_path: Path, option: str, dtype: torch.dtype
) -> None:
    model = random_gpt(GPT)
    save_gpt(str(tmp_path / "run"), model)
    reshard(tmp_path / "run", tmp_path / "out", saver="hf", **{option: True})
    written = load_file(tmp_path / "out" / "model.safetensors")
    mine = model.state_dict()["embedding.word_embeddings.weight"]
    assert {tensor.dtype for tensor in written.values()} == {dtype}
    assert torch.equal(written["model.embed_tokens.weight"], mine.to(dtype))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert str(dtype).endswith(config.get("torch_dtype", config.get("dtype")))


def test_weights_that_a_training_goes_on_from_are_not_rounded(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT))
    with pytest.raises(ConfigError, match=r"--bf16: .* the weights themselves.* --saver hf"):
        reshard(tmp_path / "run", tmp_path / "out", saver="torch_dist", bf16=True)
    with pytest.raises(ConfigError, match="--bf16 cannot be applied: a trainyard checkpoint is"):
        reshard(tmp_path / "run", tmp_path / "out", bf16=True)


def test_the_saver_megatron_keeps_the_class_of_the_source(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT2))
    for saver in ("core", "legacy"):
        reshard(tmp_path / "run", tmp_path / saver, saver=saver)
        reshard(tmp_path / saver, tmp_path / f"{saver} again", saver="megatron")
        first, again = (_keys(tmp_path / name) for name in (saver, f"{saver} again"))
        assert first == again
        assert ("language_model" in first) == (saver == "legacy")


def _keys(folder: Path) -> set[str]:
    (path,) = folder.rglob("model_optim_rng.pt")
    return set(torch.load(path, weights_only=False)["model"])
