"""BERT in Megatron-LM's checkpoints: names of both classes, the published files, every split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.conversion.megatron.bert_of_2019 import oldest, save_oldest
from tests.trainyard.conversion.megatron.converted_runs import ROWS, convert_run, save_weights
from tests.trainyard.models.perturbed import perturb
from trainyard.conversion.megatron.names import flatten, our_name
from trainyard.conversion.megatron.read import open_megatron
from trainyard.conversion.source import model_shapes
from trainyard.errors import ConfigError
from trainyard.models.bert.config import BertConfig
from trainyard.models.bert.model import BertModel
from trainyard.models.init import init_parameters

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
}
BERT_345M: dict[str, Any] = {
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 512,
}


def weights(**options: Any) -> tuple[BertConfig, dict[str, Tensor]]:
    config = BertConfig(**SIZES, **options)
    model = BertModel(config, ROWS)
    init_parameters(model, 3)
    perturb(model, seed=4, scale=1.0)
    return config, {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize(("rows", "parameters"), [(30592, 336_297_858), (29056, 334_723_458)])
def test_the_published_bert_345m_has_our_names_and_shapes(rows: int, parameters: int) -> None:
    """megatron_bert_345m_v0.1_uncased and _cased, of full shape."""
    config = BertConfig(**BERT_345M)
    named = {our_name(p, tied=True, family="bert"): s for p, s in oldest(config, rows).items()}
    assert named == model_shapes(config, rows)
    assert config.num_params(rows) == parameters


def test_a_file_of_2019_is_read(tmp_path: Path) -> None:
    config, ours = weights()
    save_oldest(tmp_path, config, ROWS, ours)
    with pytest.raises(ConfigError, match="16 for NVIDIA's GPT-345M and BERT-345M"):
        open_megatron(str(tmp_path))
    with open_megatron(str(tmp_path), num_attention_heads=4) as source:
        assert isinstance(source.config, BertConfig)
        assert (source.config.positions, source.config.activation) == (16, "gelu_tanh")
        for name, tensor in ours.items():
            assert torch.equal(source.read(f"model.{name}"), tensor.half()), name


@pytest.mark.slow
@pytest.mark.parametrize("split", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2, "vpp": 2}], ids=str)
@pytest.mark.parametrize("kind", ["legacy", "transformer_engine", "local"])
@pytest.mark.parametrize("options", [{}, {"bert_binary_head": False}], ids=["sop", "words"])
def test_every_split_is_written_and_read(
    tmp_path: Path, kind: str, split: dict[str, int], options: dict[str, Any]
) -> None:
    config, ours = weights(**options)
    save_weights(tmp_path / "run", config, ours)
    if kind == "legacy":
        made = convert_run(tmp_path, model_class="legacy", **split)
    else:
        made = convert_run(tmp_path, transformer_impl=kind, **split)
    with open_megatron(str(made)) as source:
        assert isinstance(source.config, BertConfig)
        assert source.config.bert_binary_head == config.bert_binary_head
        assert source.config.token_types == config.token_types
        assert {name.removeprefix("model.") for name in source.specs} == set(ours)
        for name, tensor in ours.items():
            assert torch.equal(source.read(f"model.{name}"), tensor), name


def test_legacy_files_have_the_names_of_megatron(tmp_path: Path) -> None:
    config, ours = weights()
    save_weights(tmp_path / "run", config, ours)
    made = convert_run(tmp_path, model_class="legacy", pp=2)
    first, last = (
        torch.load(
            made / "iter_0000100" / f"mp_rank_00_00{rank}" / "model_optim_rng.pt",
            weights_only=False,
        )["model"]
        for rank in (0, 1)
    )
    assert set(first) == {"language_model"}
    assert set(first["language_model"]["embedding"]) == {
        *("word_embeddings", "position_embeddings", "tokentype_embeddings")
    }
    assert set(last) == {*("language_model", "lm_head", "binary_head"), "word_embeddings_for_head"}
    assert set(last["language_model"]["pooler"]) == {"dense.weight", "dense.bias"}
    assert set(last["lm_head"]) == {
        *("bias", "dense.weight", "dense.bias", "norm.weight", "norm.bias")
    }
    assert set(last["binary_head"]) == {"weight", "bias"}
    assert "final_norm.weight" in last["language_model"]["encoder"]
    assert sum(1 for _ in flatten(first)) == 3 + 2 * 12


def test_a_bert_that_megatron_does_not_have_is_refused(tmp_path: Path) -> None:
    save_weights(tmp_path / "run", *weights(post_layernorm=True))
    with pytest.raises(ConfigError, match="Megatron-LM's BERT has no --post-layernorm"):
        convert_run(tmp_path)
