"""The models of recipes/models have their published numbers of parameters."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from stages.pretrain.config import PretrainConfig
from trainyard.config import leaves
from trainyard.models.config import TransformerConfig
from trainyard.models.families import FAMILIES, read_model_config

FOLDER = Path(__file__).parents[4] / "recipes" / "models"
PUBLISHED = {
    "gpt-125m": (50257, 124_439_808),
    "gpt-345m": (50257, 354_823_168),
    "gpt-1.3b": (50257, 1_315_723_264),
    "gpt-7b": (50257, 6_658_404_352),
    "gpt3-175b": (50257, 174_604_259_328),
    "llama2-7b": (32000, 6_738_415_616),
    "llama2-70b": (32000, 68_976_648_192),
    "llama3-8b": (128256, 8_030_261_248),
    "llama3-70b": (128256, 70_553_706_496),
    "mistral-7b": (32000, 7_241_732_096),
    "qwen3-8b": (151936, 8_190_735_360),
    "mixtral-8x7b": (32000, 46_702_792_704),
    "qwen3-30b-a3b": (151936, 30_532_122_624),
    "deepseek-v2-lite": (102400, 15_706_484_224),
    "deepseek-v3": (129280, 671_026_404_352 + 11_610_067_968),
    "gpt-oss-20b": (201088, 20_914_757_184),
    "bert-345m": (30522, 336_226_108),
    "t5-220m": (30622, 222_420_382),
    "retro-843m": (256000, 877_518_848),
    "mamba-130m": (50288, 128_989_632),
    "hybrid-800m": (256000, 907_127_680),
}
"""Tokens, not padded, and parameters: as the weights were published, GPT's by the formula of
arXiv:2104.04473, section 2; DeepSeek-V3's without the biases of the choice, which have no gradient,
and with the layer of multi-token prediction, whose tables are the model's."""


def document(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def model(name: str) -> TransformerConfig:
    options = document(name)
    family = FAMILIES[options.get("model_type", "gpt")]
    known = {key for key, _, _ in leaves(family.config)}
    return read_model_config({k: v for k, v in options.items() if k in known}, name)


def test_every_preset_is_counted() -> None:
    assert {file.stem for file in FOLDER.glob("*.toml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_their_published_parameters(name: str) -> None:
    vocab, published = PUBLISHED[name]
    assert model(name).num_params(vocab) == published
    assert f"{published:,}" in (FOLDER / f"{name}.toml").read_text()


@pytest.mark.parametrize(
    "name", [n for n in PUBLISHED if n.startswith(("gpt-1", "gpt-3", "gpt-7", "gpt3"))]
)
def test_gpt_presets_follow_the_formula_of_the_paper(name: str) -> None:
    config, (vocab, published) = model(name), PUBLISHED[name]
    h, layers = config.hidden_size, config.num_layers
    in_layers = 12 * layers * h * h + 13 * layers * h
    assert published == in_layers + (vocab + config.seq_length) * h + 2 * h


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_documents_of_pretrain(name: str) -> None:
    known = {key for key, _, _ in leaves(PretrainConfig)}
    assert set(document(name)) <= known


def test_gpt3_runs_as_upstream_runs_it() -> None:
    document_ = document("gpt3-175b")
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "global_batch_size")
    assert [document_[key] for key in degrees] == [8, 16, 1536]
    assert document_["rampup_batch_size"] == [16, 16, 5859375]
