"""Vectors against a plain loop over transformers' models, and what they do not depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tests.trainyard.embedding.encoders import TEXTS, embed, embedder, make, reference
from trainyard.embedding import embedder as module
from trainyard.embedding.config import EmbeddingConfig
from trainyard.errors import ConfigError

SAME = {"rtol": 0.0, "atol": 2e-5}

KINDS: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "BertForPreTraining": {},
    "BertForSequenceClassification": {"hidden_act": "gelu_new"},
    "MegatronBertModel": {},
    "MegatronBertForMaskedLM": {"hidden_act": "gelu_new"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bert")


@pytest.fixture(scope="module")
def bert(folder: Path) -> Any:
    return make(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Post-norm and pre-norm, with any head or none."""
    model = make(tmp_path, kind, **KINDS[kind])
    mine = embedder(tmp_path)
    wanted = reference(model, mine.encoder, tmp_path, TEXTS)
    assert np.abs(wanted).max() > 0.5
    np.testing.assert_allclose(embed(mine, TEXTS), wanted, **SAME)


@pytest.mark.parametrize("pooling", ["mean", "mean-all", "cls"])
def test_pooling_is_that_of_a_plain_loop(pooling: str, bert: Any, folder: Path) -> None:
    mine = embedder(folder, pooling=pooling)
    wanted = reference(bert, mine.encoder, folder, TEXTS, pooling)
    np.testing.assert_allclose(embed(mine, TEXTS), wanted, **SAME)
    unit = embed(embedder(folder, pooling=pooling, normalize=True), TEXTS)
    lengths = np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, wanted / lengths, **SAME)


def test_a_vector_depends_on_its_text_alone(bert: Any, folder: Path) -> None:
    """Not on the texts beside it, their order, or the size of a batch."""
    mine = embedder(folder)
    together = embed(mine, TEXTS)
    alone = np.concatenate([embed(mine, [text]) for text in TEXTS])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)
    backwards = embed(embedder(folder, retro_bert_batch_size=1), TEXTS[::-1])[::-1]
    np.testing.assert_allclose(together, backwards, rtol=0, atol=1e-6)


def test_bits_do_not_depend_on_the_number_of_threads(
    bert: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_BATCH_TOKENS", 32)
    before = torch.get_num_threads()
    found = [embed(embedder(folder, workers), TEXTS * 3).tobytes() for workers in (1, 2, 5)]
    assert found[0] == found[1] == found[2]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("options", "error"), [({"bf16": True}, 0.03), ({"fp16": True}, 0.004)])
def test_half_precision_is_near(
    options: dict[str, Any], error: float, bert: Any, folder: Path
) -> None:
    whole, half = embed(embedder(folder), TEXTS), embed(embedder(folder, **options), TEXTS)
    assert half.dtype == np.float32
    differences = np.linalg.norm(whole - half, axis=1) / np.linalg.norm(whole, axis=1)
    assert 1e-5 < differences.max() < error


def test_no_texts_have_no_vectors(bert: Any, folder: Path) -> None:
    assert embed(embedder(folder), []).shape == (0, 32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bf16": True, "fp16": True}, "give --bf16 or --fp16, not both"),
        ({"retro_bert_max_chunk_length": 2}, "--retro-bert-max-chunk-length must be at least 3"),
        ({"retro_bert_batch_size": 0}, "--retro-bert-batch-size must be at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EmbeddingConfig(**options)
