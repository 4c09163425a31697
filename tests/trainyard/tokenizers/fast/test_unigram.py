"""Long texts in windows: the ids that a unigram model makes of the whole, rounding included."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.tokenizers.hostile import HOSTILE, corpus, random_texts
from tests.trainyard.tokenizers.models import MODELS, train
from trainyard.tokenizers.fast import parts, sentencepiece_engine, unigram
from trainyard.tokenizers.fast.sentencepiece_engine import Pieces
from trainyard.tokenizers.fast.sentencepiece_model import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    VocabPiece,
    parse_pieces,
)
from trainyard.tokenizers.fast.unigram import Windows, find_windows

pytestmark = pytest.mark.slow

REAL = ("albert", "seqio", "spm")
TRAINED: dict[str, dict[str, Any]] = {
    "bytes": {"byte_fallback": True},
    "plain": {},
    "removes": {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc_cf"},
    "symbols": {"user_defined_symbols": ["<|im_start|>", "###", "aa", "1"]},
}


@cache
def trained(name: str) -> Pieces:
    data = train(**{"model_type": "unigram", "vocab_size": 400} | TRAINED[name])
    return Pieces(data, name, use_gigatoken=False)


def windows_of(pieces: Pieces) -> Windows:
    found = pieces._windows
    assert found is not None
    return found


def assert_equal(pieces: Pieces, text: str) -> None:
    found = windows_of(pieces).encode(text)
    assert found is not None
    assert found.tolist() == pieces.by_library([text])[0]


def scrambled(seed: int, count: int) -> str:
    """Words, known and unknown characters, symbols, and runs of spaces."""
    rng = random.Random(seed)
    some = (
        "the",
        "cat",
        "sat",
        "mats,",
        "aa",
        "a",
        "12",
        "-" * 9,
        "\u4f60\u597d",
        "na\u00efve",
        "###",
    )
    rare = ("\U0001f600", "\u0416\u0416", "<|im_start|>", "\u2581", "zq" * 30, " ", "\n", "\x00")
    rare += tuple(
        "".join(rng.choices(of, k=500))
        for of in ("catshe", "0123", "\u4f60\u597dc", "-=", "\u0416\u0436")
    )
    words = (rng.choice(some if rng.random() < 0.95 else rare) for _ in range(count))
    return " ".join(words)


@pytest.mark.parametrize("name", TRAINED)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), letters=st.integers(50, 3000), text=st.text(max_size=50))
def test_windows_make_the_ids_of_the_whole(name: str, seed: int, letters: int, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_LETTERS", letters)
        assert_equal(trained(name), text + scrambled(seed, 9000) + text)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), letters=st.integers(300, 9000), text=st.text(max_size=50))
def test_many_windows_make_the_ids_of_the_whole(
    name: str, seed: int, letters: int, text: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_LETTERS", letters)
        assert_equal(trained(name), text + scrambled(seed, 20_000) + text)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("letters", [3000, 1 << 18])
def test_the_corpora_as_one_text(
    shared: Path, name: str, letters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_LETTERS", letters)
    path = shared / MODELS[name]
    pieces = Pieces(path.read_bytes(), name, use_gigatoken=False)
    where = shared / "data/corpora"
    files = {"corpus_en.jsonl": 20, "wiki_zh.jsonl": 20, "multilingual_mix.jsonl": 1}
    for file, step in {**files, "code.jsonl": 1, "tinyshakespeare.txt": 1}.items():
        assert_equal(pieces, " ".join(corpus(where / file, step)))
    assert_equal(pieces, " a b ".join([*random_texts(3000), *HOSTILE]))


def test_scores_must_be_added_up_as_the_library_adds_them(shared: Path) -> None:
    # Parts by themselves do not make the ids of the whole: this is what windows are for.
    pieces = Pieces((shared / MODELS["albert"]).read_bytes(), "albert", use_gigatoken=False)
    text = " ".join(corpus(shared / "data/corpora/corpus_en.jsonl", 100))[:400_000]
    cut = parts.parts(text, parts.SPACE_SEAM, 3000)
    rows = [pieces.by_library([part[1:] if k else part])[0] for k, part in enumerate(cut)]
    assert [i for row in rows for i in row] != pieces.by_library([text])[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_LETTERS", 3000)
        assert_equal(pieces, text)


def test_a_long_text_is_encoded_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentencepiece_engine, "LONG_LETTERS", 3000)
    monkeypatch.setattr(parts, "PART_LETTERS", 500)
    pieces = trained("bytes")
    texts = ["the cat", scrambled(1, 5000), "", "sat  on"]
    expected = [i for row in pieces.by_library(texts) for i in row]
    asked: list[int] = []
    whole = pieces.by_library
    monkeypatch.setattr(
        pieces, "by_library", lambda given: asked.extend(map(len, given)) or whole(given)
    )
    assert pieces.encode_flat(texts)[0].tolist() == expected
    assert max(asked) < 3000


@pytest.mark.parametrize("text", [" " * 5000, "x" * 5000, "a" * 70_000 + " b" * 40_000])
def test_texts_without_a_seam(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentencepiece_engine, "LONG_LETTERS", 3000)
    for name in ("bytes", "removes"):
        pieces = trained(name)
        assert pieces.reference_array(text).tolist() == pieces.by_library([text])[0]


def with_piece(text: str, kind: int = NORMAL) -> Callable[[Any], Any]:
    return lambda model: replace(model, pieces=(*model.pieces, VocabPiece(text, -5.0, kind)))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "goes across": with_piece("a\u2581b"),
    "symbol of spaces": with_piece("\u2581a", USER_DEFINED),
    "rules of a user": lambda model: replace(model, rules="user_defined"),
    "no prefix": lambda model: replace(model, prefix=False),
    "spaces behind": lambda model: replace(model, space_after=True),
    "pairs": lambda model: replace(model, algorithm=2),
}


def test_which_models_have_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    data = train(model_type="unigram")
    model, library = parse_pieces(data, "m"), trained("plain").library
    assert find_windows(model, data, library)
    assert find_windows(with_piece("a\u2581b", CONTROL)(model), data, library) is not None
    for refused in REFUSED.values():
        assert find_windows(refused(model), data, library) is None
    monkeypatch.setattr(unigram, "takes_away", lambda: False)  # an older version of the library
    assert find_windows(model, data, library) is None
