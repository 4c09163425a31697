"""`reshard` makes a mixture of experts of a dense model, and converts mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stages.test_reshard import GPT, UNTIED, reshard
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.conversion.huggingface.hf_models import LENGTH, make, some_tokens
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.model import load_model
from trainyard.errors import ConfigError

SAME = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("config", [GPT, UNTIED], ids=["tied", "untied"])
def test_an_upcycled_model_computes_what_the_dense_one_does(config: object, tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "dense"), random_gpt(config))  # type: ignore[arg-type]
    reshard(tmp_path / "dense", tmp_path / "experts", upcycle_num_experts=4)
    found = open_checkpoint(str(tmp_path / "experts"))
    assert found.step == 0
    assert not found.names("optimizer.")
    dense = load_model(str(tmp_path / "dense")).model
    mixture = load_model(str(tmp_path / "experts")).model
    assert mixture.config.experts.num_experts == 4
    tokens = torch.randint(0, 200, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(mixture(tokens), dense(tokens), **SAME)
    routers = [p for n, p in mixture.named_parameters() if "router" in n]
    assert all(p.std() > 0 for p in routers)


@pytest.mark.slow
def test_only_a_dense_gpt_is_upcycled(tmp_path: Path) -> None:
    make("mixtral", tmp_path / "hf")
    with pytest.raises(ConfigError, match="holds a GPT with experts"):
        reshard(tmp_path / "hf", tmp_path / "out", upcycle_num_experts=4)
    with pytest.raises(ConfigError, match=r"--upcycle-router-topk \(2\) must be from 2"):
        reshard(tmp_path / "hf", tmp_path / "out", upcycle_num_experts=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"saver": "legacy"}, "has no --num-experts"),
        (
            {"saver": "llama_mistral", "saver_checkpoint_type": "meta"},
            "cannot hold a model with .*--num-experts",
        ),
        ({"saver": "core", "target_expert_parallel_size": 3}, r"\(3\) must divide the 4 experts"),
    ],
    ids=["legacy", "meta", "core"],
)
def test_formats_without_experts_refuse_them(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make("mixtral", tmp_path / "hf")
    with pytest.raises(ConfigError, match=message):
        reshard(tmp_path / "hf", tmp_path / "out", **options)


def test_mixtral_comes_in_by_megatrons_loader(tmp_path: Path) -> None:
    theirs = make("mixtral", tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "ours", loader="mixtral_hf")
    ours = load_model(str(tmp_path / "ours")).model
    tokens = some_tokens()[:, :LENGTH]
    with torch.no_grad():
        logits = theirs(tokens).logits[..., : ours.true_vocab_size]
        torch.testing.assert_close(ours(tokens), logits, **SAME)
    make("llama", tmp_path / "llama")
    with pytest.raises(ConfigError, match=r"mixtral_hf: the model at .* has no experts"):
        reshard(tmp_path / "llama", tmp_path / "out", loader="mixtral_hf")
