"""Words of any length in windows: the ids of the whole, for any merges."""

from __future__ import annotations

import json
import random
import string
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers.pre_tokenizers import ByteLevel

from tests.trainyard.tokenizers import models
from tests.trainyard.tokenizers.fast.test_gigatoken import (
    BYTES,
    CL100K,
    END,
    NOSY,
    WORD,
    added,
    ids_of,
    library,
    split,
)
from tests.trainyard.tokenizers.fast.test_seams import DEEPSEEK, ENDS, O200K, in_turn
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.fast import gigatoken as engine_module
from trainyard.tokenizers.fast import long_text
from trainyard.tokenizers.fast.gigatoken import gigatoken_for
from trainyard.tokenizers.fast.long_text import Lengths, Unbroken
from trainyard.tokenizers.fast.rows import LETTERS, LOWER, MARKS, NUMBERS, OTHER_MARKS, Rows
from trainyard.tokenizers.fast.seams import find_rows, find_seam
from trainyard.tokenizers.registry import build_tokenizer

pytestmark = pytest.mark.slow

OVERLAP, WINDOW = 64, 150
LONGEST = OVERLAP // 4


def set_sizes(patch: pytest.MonkeyPatch, overlap: int, window: int) -> None:
    patch.setattr(long_text, "OVERLAP_LETTERS", overlap)
    for module in (engine_module, long_text):
        patch.setattr(module, "WINDOW_LETTERS", window)


@pytest.fixture(autouse=True)
def small_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, OVERLAP, WINDOW)
        yield


def with_merges(merges: list[tuple[str, str]], **parts: Any) -> Library:
    """The test vocabulary with these merges, in the order of their ranks."""
    vocab = {token: i for token, i in NOSY["model"]["vocab"].items() if len(token) == 1}
    for a, b in merges:
        vocab.setdefault(a + b, len(vocab))
    model = {"vocab": vocab, "merges": [list(pair) for pair in dict.fromkeys(merges)]}
    given = {"added_tokens": [added("<|endoftext|>", len(vocab))]} | parts
    return library(model=model, **given)


def bytes_of(reference: Library) -> dict[int, bytes]:
    """The tokens of a byte-level vocabulary."""
    plain = {chr(b): b for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    rest = iter(b for b in range(256) if chr(b) not in plain)
    letters = {c: plain[c] if c in plain else next(rest) for c in sorted(ByteLevel.alphabet())}
    vocab = reference.get_vocab(with_added_tokens=False)
    return {i: bytes(letters[c] for c in token) for token, i in vocab.items()}


@st.composite
def merges_of(draw: Any, letters: str = "abc") -> list[tuple[str, str]]:
    """Any pairs of tokens that there are, in any order, of tokens short enough for windows."""
    tokens, found = list(letters), []
    for _ in range(draw(st.integers(1, 12))):
        a, b = draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens))
        if len(a + b) <= LONGEST:
            found.append((a, b))
            tokens.append(a + b)
    return list(draw(st.permutations(found)))


def cutter_of(reference: Library) -> Unbroken:
    rows, lengths = find_rows(reference), Lengths.of(bytes_of(reference))
    assert rows is not None
    assert lengths is not None
    return Unbroken(rows, lengths, find_seam(reference))


def asks(reference: Library, text: str, given: list[str] | None = None) -> Callable[..., Any]:
    """What encodes a part of a text, and keeps it."""

    def encode(start: int, end: int) -> Any:
        if given is not None:
            given.append(text[start:end])
        return np.array(ids_of(reference, [text[start:end]])[0], np.uint32)

    return encode


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_windows_make_the_ids_of_the_whole(data: Any) -> None:
    merges = data.draw(merges_of())
    assume(merges)
    reference = with_merges(merges)
    period = data.draw(st.text("abc", min_size=1, max_size=9))
    seed = data.draw(st.integers(0, 9))
    noise = "".join(random.Random(seed).choices("abc", k=400))
    cutter = cutter_of(reference)
    for word in (period * (700 // len(period)), noise * 2, period * 40 + noise + period * 40):
        text = "a word. " + word + ", " + word[:7]
        cuts = cutter.cuts(text)
        assert len(cuts) >= 2
        found = cutter.encode(text, cuts, asks(reference, text))
        assert found.tolist() == ids_of(reference, [text])[0]


ALPHABETS = (
    *("a", "abz", "aB", "1", "0123", "\u00b2\u21601", "-", "-=/", "/", "'", "!.\u201c", "\u00e9"),
    *(" ", " \t", "\n", "\r\n", "\n ", "\u3000 ", "\x85 ", "\x1c", "\u200d\ufe0f\U0001f468"),
    *("\u4f60", "\u4e00\u4f60\u597d", "\u3042\u4f60", "\u0430\u0431", "\U0001f600", "\u1100\u1161"),
    *("\u0301", "e\u0301", "\u0378", "\U000323b0", "\x00", "\ue000", "\u01c5", "a\u4f60", "\ufb01"),
)
SHORT = (*("'s", "'ll", "'LL", "x", "X", "!", " ", "\n", "1", "\u4f60", "\u00e9", "'", "/", "-\n"),)
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "nfc": {"normalizer": {"type": "NFC"}},
    "cl100k": {"pre_tokenizer": split(CL100K)},
    "o200k": {"pre_tokenizer": split(O200K + ENDS)},
    "deepseek": {"pre_tokenizer": in_turn(*DEEPSEEK)},
    "digits": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES],
        }
    },
}


@cache
def nosy_about_runs(name: str, seed: int) -> Library:
    """Merges, in any order, within runs of what there is and across their borders."""
    rng = random.Random(seed)
    cut = ByteLevel(add_prefix_space=False, use_regex=False)
    merges: dict[tuple[str, str], None] = {}
    made = set(ByteLevel.alphabet())
    while len(merges) < 900:
        around = "".join(rng.choices(rng.choice(ALPHABETS), k=4)) + rng.choice(SHORT)
        ((row, _),) = cut.pre_tokenize_str(around)
        a = rng.randrange(len(row) - 1)
        b, c = a + rng.choice((1, 1, 2, 3, 4)), a + rng.choice((2, 2, 3, 5, 8))
        pair = row[a:b], row[b:c]
        if set(pair) <= made:
            merges[pair] = None
            made.add(pair[0] + pair[1])
    order = list(merges)  # made in this order, so that any other leaves out some
    rng.shuffle(order)
    return with_merges(order, **SHAPES[name])


RUNS = st.lists(
    st.tuples(st.sampled_from(ALPHABETS), st.integers(1, 700), st.sampled_from(("", *SHORT))),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=60)
@given(runs=RUNS, seed=st.integers(0, 3), window=st.integers(130, 400))
@pytest.mark.parametrize("name", SHAPES)
def test_runs_of_every_kind_in_windows(name: str, runs: Any, seed: int, window: int) -> None:
    assert_windows_are_equal(name, runs, seed, window)


@pytest.mark.slow
@settings(deadline=None, max_examples=1000)
@given(runs=RUNS, seed=st.integers(0, 30), window=st.integers(130, 400))
@pytest.mark.parametrize("name", SHAPES)
def test_many_runs_of_every_kind_in_windows(name: str, runs: Any, seed: int, window: int) -> None:
    assert_windows_are_equal(name, runs, seed, window)


def assert_windows_are_equal(name: str, runs: Any, seed: int, window: int) -> None:
    rng = random.Random(seed)
    text = "".join("".join(rng.choices(of, k=count)) + behind for of, count, behind in runs)
    reference = nosy_about_runs(name, seed)
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, OVERLAP, window)
        cutter = cutter_of(reference)
        cuts = cutter.cuts(text)
        if cuts:
            found = cutter.encode(text, cuts, asks(reference, text))
            assert found.tolist() == ids_of(reference, [text])[0]


MANY = 40 * WINDOW
BOUNDED: dict[str, tuple[str, ...]] = {
    "gpt2": (
        *("1", "0123", "-", "'", "-=/", "!.\u201c", " ", "\n", "\n ", "\u3000 ", "\u4f60"),
        *("\u0430\u0431", "\U0001f600", "\u200d\ufe0f\U0001f468", "\u00e9", "aB", "\x00"),
    ),
    "nfc": ("1", "-=/", " ", "\u4e00\u4f60\u597d", "\u0430\u0431", "\U0001f600", "\u00e9"),
    "cl100k": ("-=/", "'", " ", "\n", "\n ", "\u4f60", "\u0430\u0431", "\U0001f600", "aB"),
    "o200k": ("-=", "'", " ", "\n", "\n ", "\u0430\u0431", "\U0001f600", "abz"),
    "deepseek": ("-=/", " ", "\n", "\n ", "\U0001f600"),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_windows_of_every_kind_are_small(name: str) -> None:
    reference = nosy_about_runs(name, 0)
    cutter = cutter_of(reference)
    for of in BOUNDED[name]:
        text = "so: " + "".join(random.Random(0).choices(of, k=MANY)) + " x end"
        given: list[str] = []
        found = cutter.encode(text, cutter.cuts(text), asks(reference, text, given))
        assert found.tolist() == ids_of(reference, [text])[0]
        assert max(map(len, given)) <= 2 * WINDOW + 2 * OVERLAP, ascii(of)


def test_the_engine_is_asked_for_windows() -> None:
    reference = with_merges([("a", "a"), ("aa", "aa"), ("b", "a")])
    engine = gigatoken_for(reference)
    assert engine is not None
    seen: list[str] = []
    whole = engine._encode
    engine._encode = lambda texts, **more: seen.extend(texts) or whole(texts, **more)  # type: ignore
    text = "so: " + "aab" * 400 + " end"
    assert engine.encode_batch([text, "x y"]) == ids_of(reference, [text, "x y"])
    assert max(map(len, seen)) <= WINDOW + 2 * OVERLAP
    assert len(seen) > 5


WIDE, BOTH = MARKS | OTHER_MARKS, (MARKS, NUMBERS)
KINDS: dict[str, tuple[dict[str, Any], Rows | None]] = {
    "gpt2": ({}, Rows((LETTERS, WIDE, NUMBERS), blanks=True)),
    "nfc": (
        {"normalizer": {"type": "NFC"}},
        Rows((LETTERS, WIDE, NUMBERS), blanks=True, nfc=True),
    ),
    "cl100k": (SHAPES["cl100k"], Rows((LETTERS, WIDE), blanks=True, breaks=True)),
    "o200k": (SHAPES["o200k"], Rows((LOWER, MARKS), frozenset("/"), True, True)),
    "prefix": ({"pre_tokenizer": BYTES | {"add_prefix_space": True}}, None),
    "deepseek": (SHAPES["deepseek"], Rows((MARKS,), blanks=True, breaks=True)),
    "digits": (SHAPES["digits"], Rows((LETTERS, WIDE), blanks=True)),
    "strips": ({"added_tokens": [END, added("<m>", WORD, lstrip=True)]}, None),
    "word": ({"added_tokens": [END, added("aba", WORD)]}, Rows((WIDE, NUMBERS), blanks=True)),
    "dashes": (
        {"added_tokens": [END, added("---", WORD), added("  ", WORD + 1)]},
        Rows((LETTERS, NUMBERS)),
    ),
    "half": (
        {"added_tokens": [END, added("ab<", WORD), added(">ba", WORD + 1)]},
        Rows((LETTERS, WIDE, NUMBERS), blanks=True),
    ),
    "long": ({"added_tokens": [END, added("<|" * 200, WORD)]}, Rows()),
}


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_known_where_they_keep_together(name: str) -> None:
    parts, rows = KINDS[name]
    reference = library(**parts)
    found = find_rows(reference)
    assert (found and set(found.kinds)) == (rows and set(rows.kinds))
    assert (
        found
        and [found.apart, found.blanks, found.breaks, found.nfc]
        == (rows and [rows.apart, rows.blanks, rows.breaks, rows.nfc])
    ) or found is rows
    engine = gigatoken_for(reference)
    if engine is None:
        return
    rng = random.Random(1)
    marks = ("", " ", "'", "\u0301", "\u00e9", "<|endoftext|>", "\u0378", "!", "ab<", "'s")
    for of in ("ab", "-<", "12", " ", "\u4f60\u597d"):
        row = "".join(rng.choices(of, k=300))
        pairs = [(a, b) for a in marks for b in marks[:: len(marks) - 1]]
        texts = [f"x{a}{row}{b}{row.upper()}{a}{row}>ba{row}ab<{b}y" for a, b in pairs]
        assert engine.encode_batch(texts) == ids_of(reference, texts)


ROWS = (
    *("a", "ab", "ACGT", string.ascii_lowercase, "the", "aabbA", string.digits, "-", "=-"),
    *(
        string.punctuation,
        "'",
        " ",
        "\n",
        " \n",
        "\u4f60\u597d\u4e16\u754c",
        "\u4f60",
        "\U0001f600",
    ),
    *("\u043f\u0440\u0438\u0432\u0435\u0442", "\u00e9\u00e8", string.printable),
)


def assert_rows_are_equal(config: TokenizerConfig, count: int, overlap: int = 512) -> None:
    rng = random.Random(0)
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, overlap, 1500)
        tokenizer = build_tokenizer(config)
        for of in ROWS:
            text = "Go: " + "".join(rng.choices(of, k=count)) + "'s end"
            expected = tokenizer.encode_reference(text)
            assert tokenizer.encode_flat([text])[0].tolist() == expected, ascii(of)


def test_words_of_gpt2(shared: Path) -> None:
    vocab = shared / "data/vocab/gpt2"
    config = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(vocab / "vocab.json"),
        merge_file=str(vocab / "merges.txt"),
    )
    assert_rows_are_equal(config, 6000)


def test_words_of_tiktoken(tmp_path: Path) -> None:
    ranks = [bytes([i]) for i in range(256)] + [b"ab", b"ba", b"aba", b"aa", b"abab", b"bb", b"--"]
    listed = [
        {"rank": i, "token_bytes": b64encode(token).decode(), "token_str": ""}
        for i, token in enumerate(ranks)
    ]
    (tmp_path / "t.json").write_text(json.dumps(listed))
    config = TokenizerConfig(
        tokenizer_type="TikTokenizer", tokenizer_model=str(tmp_path / "t.json")
    )
    assert_rows_are_equal(config, 6000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "no prefix", "symbols"])
def test_words_of_sentencepiece(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = " ".join(string.ascii_letters)
    monkeypatch.setattr(models, "BORDERS", (*models.BORDERS, (letters, "aab"), ("ACGT", "GATTACA")))
    set_sizes(monkeypatch, 256, 600)
    (tmp_path / "t.model").write_bytes(models.train(**models.TRAINED[kind], vocab_size=500))
    model = str(tmp_path / "t.model")
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model)
    )
    engine = tokenizer._pieces._gigatoken  # type: ignore[attr-defined]
    assert bool(engine and engine._unbroken) == (kind != "symbols")
    rng = random.Random(0)
    for of in (*ROWS, "ab ", "\u2581 ", "a\u0301\x00"):
        row = "".join(rng.choices(of, k=900))
        for text in (row, f" {row}", f"  so:  {row} {row}\u00e9{row}\u4f60 \u0301{row}"):
            assert tokenizer.encode_flat([text])[0].tolist() == tokenizer.encode_reference(text)


@pytest.mark.slow
def test_words_of_llama2(shared: Path) -> None:
    model = str(shared / "data/vocab/llama2/tokenizer.model")
    assert_rows_are_equal(
        TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=model), 6000
    )
