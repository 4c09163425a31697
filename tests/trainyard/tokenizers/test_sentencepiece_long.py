"""Long texts that hold special tokens, or keep their spaces: the same ids, and no list of them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.tokenizers.hostile import HOSTILE, random_texts
from tests.trainyard.tokenizers.models import MODELS
from trainyard.tokenizers import sentencepiece as module
from trainyard.tokenizers.base import Tokenizer, as_lists
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

pytestmark = pytest.mark.slow

WORDS = "the yard shunts  every train "


def legacy(shared: Path, **more: Any) -> Tokenizer:
    config = TokenizerConfig(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=str(shared / MODELS["spm"]),
        tokenizer_sentencepiece_legacy=True,
        **more,
    )
    return build_tokenizer(config)


@pytest.mark.parametrize("drops", [True, False])
def test_long_parts(shared: Path, monkeypatch: pytest.MonkeyPatch, drops: bool) -> None:
    tokenizer = legacy(shared, tokenizer_sentencepiece_ignore_extra_whitespaces=drops)
    texts = [*HOSTILE, "<MASK> a  b<EOD>c <MASK><MASK> ", *random_texts(20)]
    expected = [tokenizer.encode_reference(text) for text in texts]
    for letters in (0, 3):
        monkeypatch.setattr(module, "LONG_LETTERS", letters)
        assert as_lists(tokenizer.encode_flat(texts)) == expected
        assert [tokenizer.encode(text) for text in texts] == expected
        assert [tokenizer.reference_array(text).tolist() for text in texts] == expected


@pytest.mark.parametrize("drops", [True, False])
def test_no_list_is_made_of_the_ids_of_a_long_text(shared: Path, drops: bool) -> None:
    tokenizer = legacy(shared, tokenizer_sentencepiece_ignore_extra_whitespaces=drops)
    text = ("<MASK> " + WORDS * 40) * 200
    tracemalloc.start()
    ids, _ = tokenizer.encode_flat([text])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A list has 8 bytes for each and most often 32 more, an array 4; it grows, and is copied once.
    assert peak < 6 * len(text) < 40 * len(ids)
