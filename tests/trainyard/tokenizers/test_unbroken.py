"""Words of any length in windows: the ids of the whole, for any merges."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from tests.trainyard.tokenizers import models
from tests.trainyard.tokenizers.test_engine import END, NOSY, WORD, added, ids_of, library, split
from tests.trainyard.tokenizers.test_seams import DEEPSEEK, O200K, in_turn
from trainyard.tokenizers import engine as engine_module
from trainyard.tokenizers import unbroken
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.engine import gigatoken_for
from trainyard.tokenizers.registry import build_tokenizer
from trainyard.tokenizers.seams import find_row
from trainyard.tokenizers.unbroken import Unbroken

OVERLAP, WINDOW = 16, 70


@pytest.fixture(autouse=True)
def small_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unbroken, "OVERLAP_LETTERS", OVERLAP)
        for module in (engine_module, unbroken):
            patch.setattr(module, "WINDOW_LETTERS", WINDOW)
        yield


def with_merges(merges: list[tuple[str, str]], letters: str, **parts: Any) -> Library:
    """The test vocabulary with these merges, in the order of their ranks."""
    vocab = {token: i for token, i in NOSY["model"]["vocab"].items() if len(token) == 1}
    for a, b in merges:
        vocab.setdefault(a + b, len(vocab))
    model = {"vocab": vocab, "merges": [list(pair) for pair in dict.fromkeys(merges)]}
    return library(model=model, added_tokens=[added("<|endoftext|>", len(vocab))], **parts)


@st.composite
def merges_of(draw: Any, letters: str = "abc") -> list[tuple[str, str]]:
    """Any pairs of tokens that there are, in any order, of tokens shorter than an overlap."""
    tokens, found = list(letters), []
    for _ in range(draw(st.integers(1, 12))):
        a, b = draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens))
        if len(a + b) < 12:
            found.append((a, b))
            tokens.append(a + b)
    return list(draw(st.permutations(found)))


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_windows_make_the_ids_of_the_whole(data: Any) -> None:
    merges = data.draw(merges_of())
    assume(merges)
    reference = with_merges(merges, "abc")
    lengths = np.zeros(reference.get_vocab_size(), np.int64)
    for token, i in reference.get_vocab().items():
        lengths[i] = len(token)
    period = data.draw(st.text("abc", min_size=1, max_size=9))
    seed = data.draw(st.integers(0, 9))
    noise = "".join(random.Random(seed).choices("abc", k=200))
    for word in (period * (400 // len(period)), noise * 2, period * 20 + noise + period * 20):
        text = "a word. " + word + ", " + word[:7]
        given: list[str] = []

        def encode(start: int, end: int, text: str = text, given: list[str] = given) -> Any:
            given.append(text[start:end])
            return np.array(ids_of(reference, given[-1:])[0], np.uint32)

        cutter = Unbroken("A-Za-z", lengths)
        cuts = cutter.cuts(text)
        assert len(cuts) >= 3
        assert cutter.encode(text, cuts, encode).tolist() == ids_of(reference, [text])[0]


def test_windows_are_small_and_the_parts_of_one_word() -> None:
    reference = with_merges([("a", "a"), ("aa", "aa"), ("b", "a")], "ab")
    engine = gigatoken_for(reference)
    assert engine is not None
    seen: list[str] = []
    whole = engine._encode
    engine._encode = lambda texts, **more: seen.extend(texts) or whole(texts, **more)  # type: ignore
    text = "so: " + "aab" * 400 + " end"
    assert engine.encode_batch([text, "x y"]) == ids_of(reference, [text, "x y"])
    assert max(map(len, seen)) <= WINDOW + OVERLAP + 8 + 6 + OVERLAP
    assert len(seen) > 15


KINDS: dict[str, tuple[dict[str, Any], str | None]] = {
    "gpt2": ({}, "A-Za-z"),
    "nfc": ({"normalizer": {"type": "NFC"}}, "A-Za-z"),
    "o200k": (
        {"pre_tokenizer": split(O200K + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")},
        "a-z",
    ),
    "prefix": ({"pre_tokenizer": NOSY["pre_tokenizer"] | {"add_prefix_space": True}}, None),
    "deepseek": ({"pre_tokenizer": in_turn(*DEEPSEEK)}, None),
    "strips": ({"added_tokens": [END, added("<m>", WORD, lstrip=True)]}, None),
    "word": ({"added_tokens": [END, added("aba", WORD)]}, None),
    "half": ({"added_tokens": [END, added("ab<", WORD), added(">ba", WORD + 1)]}, "A-Za-z"),
}


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_known_where_they_keep_together(name: str) -> None:
    parts, letters = KINDS[name]
    reference = library(**parts)
    assert find_row(reference) == letters
    engine = gigatoken_for(reference)
    if engine is None:
        return
    rng = random.Random(1)
    row = "".join(rng.choices("ab", k=150))
    marks = ("", " ", "'", "\u0301", "\u00e9", "<|endoftext|>", "\u0378", "!", "ab<", "'s")
    texts = [f"x{a}{row}{b}{row.upper()}{a}{row}>ba{row}ab<{b}y" for a in marks for b in marks]
    assert engine.encode_batch(texts) == ids_of(reference, texts)
    assert [engine.encode(text) for text in texts[:9]] == ids_of(reference, texts[:9])


def test_words_of_gpt2_and_tiktoken(shared: Path, tmp_path: Path) -> None:
    vocab = shared / "data/vocab/gpt2"
    rng = random.Random(0)
    ranks = [bytes([i]) for i in range(256)] + [b"ab", b"ba", b"aba", b"aa", b"abab", b"bb"]
    listed = [{"rank": i, "token_bytes": _base64(t), "token_str": ""} for i, t in enumerate(ranks)]
    (tmp_path / "t.json").write_text(json.dumps(listed))
    for config in (
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(vocab / "vocab.json"),
            merge_file=str(vocab / "merges.txt"),
        ),
        TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(tmp_path / "t.json")),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unbroken, "OVERLAP_LETTERS", 200)
            for module in (engine_module, unbroken):
                patch.setattr(module, "WINDOW_LETTERS", 2000)
            tokenizer = build_tokenizer(config)
            for letters in ("a", "ab", "ACGT", "abcdefghijklmnopqrstuvwxyz", "the", "aabbA"):
                text = "Go: " + "".join(rng.choices(letters, k=15_000)) + "'s end"
                expected = tokenizer.encode_reference(text)
                assert tokenizer.encode_flat([text])[0].tolist() == expected


@pytest.mark.parametrize("kind", ["plain", "no prefix", "symbols"])
def test_words_of_sentencepiece(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = " ".join(string.ascii_letters)
    monkeypatch.setattr(models, "BORDERS", (*models.BORDERS, (letters, "aab"), ("ACGT", "GATTACA")))
    (tmp_path / "t.model").write_bytes(models.train(**models.TRAINED[kind], vocab_size=500))
    model = str(tmp_path / "t.model")
    monkeypatch.setattr(unbroken, "OVERLAP_LETTERS", 40)
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model)
    )
    engine = tokenizer._pieces._gigatoken  # type: ignore[attr-defined]
    assert bool(engine and engine._unbroken) == (kind != "symbols")
    rng = random.Random(0)
    for chosen in ("a", "ab", "ACGT", string.ascii_letters, "theca"):
        row = "".join(rng.choices(chosen, k=400))
        for text in (row, f" {row}", f"  so:  {row} {row}\u00e9{row}\u4f60 \u0301{row}"):
            assert tokenizer.encode_flat([text])[0].tolist() == tokenizer.encode_reference(text)


def test_words_of_llama2(shared: Path) -> None:
    model = str(shared / "data/vocab/llama2/tokenizer.model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unbroken, "OVERLAP_LETTERS", 200)
        for module in (engine_module, unbroken):
            patch.setattr(module, "WINDOW_LETTERS", 2000)
        tokenizer = build_tokenizer(
            TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=model)
        )
        rng = random.Random(0)
        for letters in ("a", "ab", "ACGT", string.ascii_letters, "the"):
            text = "Go: " + "".join(rng.choices(letters, k=20_000)) + "'s end"
            assert tokenizer.encode_flat([text])[0].tolist() == tokenizer.encode_reference(text)


def _base64(token: bytes) -> str:
    from base64 import b64encode

    return b64encode(token).decode()
