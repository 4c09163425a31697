"""BERT's word pieces: counts without ids."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainyard.retrieval.corpora import write_vocabulary
from trainyard.tokenizers.base import as_lists
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.fast import words
from trainyard.tokenizers.fast.seams import PART_LETTERS
from trainyard.tokenizers.wordpiece import WordPieceTokenizer, build_wordpiece


@pytest.mark.parametrize("around", [False, True])
def test_lengths_are_those_of_the_ids(tmp_path: Path, around: bool) -> None:
    tokenizer = build_wordpiece(
        TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase",
            vocab_file=write_vocabulary(tmp_path),
            tokenizer_hf_include_special_tokens=around,
        )
    )
    random = Random(1)
    letters = [*map(chr, range(0x180)), *"\u0301\u0307\u03a3\u2028\u3000\u4e2d\ufffd    "]
    letters += ["[SEP]", " [", "MASK]"]
    texts = ["", " \n", "a train, words"]
    texts += ["".join(random.choices(letters, k=length % 40)) for length in range(400)]
    for more in ([], ["a" * (PART_LETTERS + 1)] if around else []):
        wanted = [len(ids) for ids in tokenizer.encode_batch(texts + more)]
        assert tokenizer.lengths(texts + more).tolist() == wanted


def wordpiece(folder: Path, **options: Any) -> WordPieceTokenizer:
    """A tokenizer of few words."""
    given: dict[str, Any] = {"tokenizer_type": "BertWordPieceLowerCase", **options}
    return build_wordpiece(TokenizerConfig(vocab_file=write_vocabulary(folder), **given))


@pytest.mark.parametrize("limit", ["MAX_WORDS", "MAX_LETTERS"])
def test_remembered_words_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(words, limit, 3)
    tokenizer = wordpiece(tmp_path)
    for text in ("a b", "a c d", "d a", "a b c d e"):
        assert tokenizer.lengths([text, "a"]).tolist() == [len(text.split()), 1]


ODD = "\x00\x0b\x1c\x85\u00a0\u00e9\u0130\u0301\u03a3\u2028\u3000\u4e2d\ufffd\U0001f600"
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["train", "Trains,", "don't", "[SEP]", "[MASK]x", "x[SEP", "a" * 120]),
        st.text(" \t\n\raAbt1'-[]#" + ODD, max_size=9),
        st.text(max_size=5),
    ),
    max_size=8,
).map(" ".join)


@pytest.fixture(scope="module")
def remembering(tmp_path_factory: pytest.TempPathFactory) -> list[WordPieceTokenizer]:
    """Tokenizers of each kind, which keep their words from text to text."""
    folder = tmp_path_factory.mktemp("vocabulary")
    cased: dict[str, Any] = {"tokenizer_type": "BertWordPieceCase"}
    special: dict[str, Any] = {"tokenizer_special_tokens": ("train", "b b")}
    around: dict[str, Any] = {"tokenizer_hf_include_special_tokens": True}
    return [wordpiece(folder, **one) for one in ({}, cased, special, around)]


@given(texts=st.lists(TEXTS, max_size=4), most_new=st.sampled_from([0.0, 0.5]))
def test_remembered_words_give_the_ids_of_the_library(
    remembering: list[WordPieceTokenizer], texts: list[str], most_new: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "FEW_WORDS", 0)
        patch.setattr(words, "MOST_NEW", most_new)
        for tokenizer in remembering:
            expected = [tokenizer.encode_reference(text) for text in texts]
            assert as_lists(tokenizer.encode_flat(texts)) == expected
            assert tokenizer.lengths(texts).tolist() == list(map(len, expected))


def test_half_a_character_is_named_by_its_place_in_the_text(tmp_path: Path) -> None:
    tokenizer = wordpiece(tmp_path)
    for _ in range(2):
        with pytest.raises(UnicodeEncodeError, match="position 4"):
            tokenizer.encode_flat(["a b \ud800"])
    assert as_lists(tokenizer.encode_flat(["a b"])) == [tokenizer.encode("a b")]
