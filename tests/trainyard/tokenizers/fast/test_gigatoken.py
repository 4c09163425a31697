"""When gigatoken encodes and when it does not; the ids are the same."""

from __future__ import annotations

import copy
import json
import logging
import sys
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers.pre_tokenizers import ByteLevel

from tests.trainyard.tokenizers.hostile import HOSTILE, random_texts
from tests.trainyard.tokenizers.kinds import huggingface
from trainyard.tokenizers.base import as_lists, flatten, replace_rows
from trainyard.tokenizers.fast import gigatoken as engine_module
from trainyard.tokenizers.fast import seams
from trainyard.tokenizers.fast.gigatoken import Gigatoken, gigatoken_for
from trainyard.tokenizers.fast.probe import overlap
from trainyard.tokenizers.fast.unicode_mismatch import Suspects, unassigned
from trainyard.tokenizers.hf_tokenizers import surround, tokens_around

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def added(content: str, number: int, **more: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags, **more}


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, BYTES | {"use_regex": False}]}


def nosy_document() -> dict[str, Any]:
    """A vocabulary that joins the last byte of any character with an ASCII letter, digit, mark or
    line end behind it, so that the ids tell the class of the character."""
    letters = ByteLevel(add_prefix_space=False, use_regex=False)
    name = {b: letters.pre_tokenize_str(bytes([b]).decode())[0][0] for b in range(128)}
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    merges = [(x, name[ord(y)]) for y in "a1!\n" for x in alphabet if x != name[0x20]]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    return {
        "version": "1.0",
        "added_tokens": [added("<|endoftext|>", len(vocab))],
        "normalizer": None,
        "pre_tokenizer": BYTES,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": list(map(list, merges))},
    }


NOSY = nosy_document()


def library(**parts: Any) -> Library:
    document = copy.deepcopy(NOSY)
    document["model"].update(parts.pop("model", {}))
    return Library.from_str(json.dumps(document | parts))


def ids_of(reference: Library, texts: Sequence[str]) -> list[list[int]]:
    return [e.ids for e in reference.encode_batch(list(texts), add_special_tokens=False)]


def engine_for(reference: Library) -> Gigatoken:
    engine = gigatoken_for(reference)
    assert engine is not None
    return engine


# --- equal or not used ------------------------------------------------------------------------

END = added("<|endoftext|>", len(NOSY["model"]["vocab"]))
WORD = len(NOSY["model"]["vocab"]) + 1
TAKEN: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "prefix": {"pre_tokenizer": BYTES | {"add_prefix_space": True}},
    "cl100k": {"pre_tokenizer": split(CL100K)},
    "nfc": {"normalizer": {"type": "NFC"}},
    "nfc in a sequence": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}},
    "strips": {"added_tokens": [END, added("<mask>", WORD, lstrip=True, rstrip=True)]},
    "overlap": {"added_tokens": [END, added("<s", WORD), added("<s>", WORD + 1)]},
    "spaces": {"added_tokens": [END, added("   ", WORD, normalized=True)]},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"model": {"dropout": 0.5}}, "no BPE with dropout"),
    "suffix": ({"model": {"end_of_word_suffix": "</w>"}}, "end_of_word_suffix"),
    "lower": ({"normalizer": {"type": "Lowercase"}}, "no normalizer of type Lowercase"),
    "nfkc": ({"normalizer": {"type": "NFKC"}}, "no normalizer of type NFKC"),
    "removed": ({"pre_tokenizer": split(r"\s+", "Removed")}, "no Split that does not keep"),
    "unknown split": ({"pre_tokenizer": split(r"\w+|\W")}, "gigatoken: Unknown pre_tokenizer"),
    "no words": ({"pre_tokenizer": None}, "it makes other ids for "),
    "whole word": ({"added_tokens": [END, added("w", WORD, single_word=True)]}, "word by itself"),
    "both kinds": (
        {"added_tokens": [END, added("text|", WORD, normalized=True)]},
        "of both kinds",
    ),
    "greedy": (
        {"added_tokens": [END, added("<m>", WORD, rstrip=True), added(" ", WORD, normalized=True)]},
        "takes the spaces of another",
    ),
    "accented": (
        {"normalizer": {"type": "NFC"}, "added_tokens": [added("\u00e9t", WORD, normalized=True)]},
        "that NFC may change",
    ),
}


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("name", TAKEN)
def test_what_gigatoken_encodes_is_what_the_library_encodes(name: str) -> None:
    reference = library(**TAKEN[name])
    engine = engine_for(reference)
    texts = [*HOSTILE, *random_texts(150), "a<mask> <s> <mask>", "     "]
    assert engine.encode_batch(texts) == ids_of(reference, texts)


@pytest.mark.parametrize("name", REFUSED)
def test_the_library_encodes_what_gigatoken_cannot(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts, reason = REFUSED[name]
    with caplog.at_level(logging.WARNING):
        assert gigatoken_for(library(**parts)) is None
    assert "encoding with the reference library, which is slower" in caplog.text
    assert reason in caplog.text


def test_no_gigatoken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with caplog.at_level(logging.WARNING):
        assert gigatoken_for(library()) is None
    assert "gigatoken" in caplog.text


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [("ab", "bc", True), ("bc", "ab", True), ("abc", "b", True), ("ab", "cd", False)],
)
def test_overlap(a: str, b: str, expected: bool) -> None:
    assert overlap(a, b) is expected


# --- characters that one library knows and the other does not ---------------------------------


def test_new_characters_are_cut_as_the_library_cuts_them() -> None:
    reference = library()
    engine = engine_for(reference)
    empty = [chr(c) for c in np.flatnonzero(unassigned())[::4000].tolist()]
    texts = [f"x{c}a {c}1 {c}! {c}{c}a" for c in [*empty, "\u088f", "\U00010940", "\U000323b0"]]
    assert engine.encode_batch(texts) == ids_of(reference, texts)
    assert [engine.encode(text) for text in texts] == ids_of(reference, texts)


@pytest.mark.full
@pytest.mark.timeout(900)  # a slow machine takes 230 s alone
@pytest.mark.parametrize("name", ["gpt2", "cl100k", "nfc"])
def test_every_character_is_cut_as_the_library_cuts_it(name: str) -> None:
    reference = library(**TAKEN[name])
    engine = engine_for(reference)
    for start in range(0, 0x110000, 4096):
        points = [c for c in range(start, start + 4096) if not 0xD800 <= c < 0xE000]
        texts = [f"a{c}a 1{c}1 !{c}!{c}\n{c} {c}a\u0316\u0301{c}" for c in map(chr, points)]
        assert engine.encode_batch(texts) == ids_of(reference, texts)


@pytest.mark.skipif(unicodedata.unidata_version < "14", reason="Python 3.11 has 14.0.0")
def test_pythons_tables_are_no_newer_than_those_of_the_libraries() -> None:
    """unicode_mismatch.py relies on this; the newest letter that Python knows is one."""
    letters = [c for c in range(0x30000, 0x33480) if unicodedata.category(chr(c)) == "Lo"]
    texts = [f"{chr(c)}a" for c in letters[-50:]]
    engine = engine_for(library())
    suspects = Suspects({i: bytes([i]) for i in range(256)}, nfc=False)
    assert not any(map(suspects.is_suspect, texts))
    assert engine.encode_batch(texts) == ids_of(library(), texts)


# --- threads and memory -----------------------------------------------------------------------


@pytest.mark.slow
def test_threads_share_an_engine() -> None:
    reference = library()
    engine = engine_for(reference)
    texts = random_texts(200)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: engine.encode_batch(texts[k:]), range(24)))
    expected = ids_of(reference, texts)
    assert found == [expected[k:] for k in range(24)]


def test_a_worker_that_has_grown_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    class Backend:
        def encode(self, text: str) -> Any:
            return np.array([len(text)], np.uint32)

    def make() -> Backend:
        built.append(Backend())
        return built[-1]

    engine = Gigatoken(make, lambda texts: [])
    monkeypatch.setattr(engine_module, "REBUILD_LETTERS", 10)
    monkeypatch.setattr(engine_module, "REBUILD_GROWTH_BYTES", 1 << 60)
    assert [engine.encode("x" * 8) for _ in range(4)] == [[8]] * 4
    assert len(built) == 1
    monkeypatch.setattr(engine_module, "REBUILD_GROWTH_BYTES", -(1 << 60))
    assert [engine.encode("x" * 8) for _ in range(4)] == [[8]] * 4
    assert len(built) == 3  # at once, and after two of the new one's
    monkeypatch.setattr(engine_module, "resident_bytes", lambda: None)
    assert [engine.encode("x" * 8) for _ in range(4)] == [[8]] * 4
    assert len(built) <= 4


def test_half_a_pair_of_surrogates_is_an_error(tmp_path: Path) -> None:
    for fast in (True, False):
        (tmp_path / "tokenizer.json").write_text(library().to_str())
        tokenizer = huggingface(tmp_path, use_gigatoken=fast)
        for encode in (tokenizer.encode_batch, lambda texts, t=tokenizer: t.encode(texts[0])):
            with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
                encode(["\ud800"])
        assert tokenizer.encode_batch(["a", ""]) == [tokenizer.encode("a"), []]


@pytest.mark.full
def test_memory_stays_within_bounds_over_endless_new_words() -> None:
    engine = engine_for(library())
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)
    start = engine_module.resident_bytes()
    assert start is not None
    for _ in range(300):
        engine.encode_flat([letters[rng.integers(0, len(letters), 1 << 20)].tobytes().decode()])
        size = engine_module.resident_bytes()
        assert size is not None
        assert size - start < 800 << 20


# --- long texts -------------------------------------------------------------------------------


@pytest.mark.slow
def test_long_texts_are_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    words = " some words of plain text ".join([*HOSTILE, *random_texts(30), "\u0378"])
    document = json.loads(library(added_tokens=[END, added("<a b>", WORD)]).to_str())
    for parts_of in ({}, TAKEN["nfc"], TAKEN["cl100k"], {"added_tokens": document["added_tokens"]}):
        engine = engine_for(library(**parts_of))
        expected = engine.encode_batch([words, "", "x\u0378"])
        with monkeypatch.context() as patch:
            patch.setattr(seams, "PART_LETTERS", 60)
            assert engine.encode_batch([words, "", "x\u0378"]) == expected
            assert engine.encode(words) == expected[0]


@pytest.mark.parametrize("name", ["gpt2", "cl100k", "nfc", "prefix"])
def test_only_suspect_parts_are_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "DOUBTFUL_LETTERS", 100)
    reference = library(**TAKEN[name])
    engine = engine_for(reference)
    given: list[str] = []
    whole = engine._reference

    def encode(texts: Sequence[str]) -> Sequence[Any]:
        given.extend(texts)
        return whole(texts)

    monkeypatch.setattr(engine, "_reference", encode)
    plain = "plain words, a1 and b!\n  more; caf\u00e9 \u4f60\u597d, " * 40
    odd = ["\u0378", "e\u0301", "\u1100\u1161", "a\u0316\u0301", "\u212b, "]
    texts = [plain + c + plain + "a" + c for c in odd]
    texts += [plain, "short", odd[0], "", *HOSTILE, " ".join([plain, *random_texts(20), plain])]
    assert engine.encode_batch(texts) == ids_of(reference, texts)
    assert [engine.encode(text) for text in texts[:6]] == ids_of(reference, texts[:6])
    alone = [text for text in given if plain[:50] in text]
    assert max(map(len, alone), default=0) < 200  # of texts of 3,600


# --- arrays -----------------------------------------------------------------------------------

ROWS = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5), max_size=6)


@given(rows=ROWS)
def test_lists_become_arrays_and_lists_again(rows: list[list[int]]) -> None:
    ids, bounds = flatten(rows)
    assert (ids.dtype, bounds.dtype, bounds[0]) == (np.uint32, np.int64, 0)
    assert as_lists((ids, bounds)) == rows
    assert as_lists(flatten(iter(rows))) == rows


@given(
    rows=ROWS, prefix=st.lists(st.integers(0, 9), max_size=2), suffix=st.lists(st.integers(0, 9))
)
def test_rows_are_surrounded(rows: list[list[int]], prefix: list[int], suffix: list[int]) -> None:
    assert as_lists(surround(flatten(rows), prefix, suffix)) == [
        prefix + row + suffix for row in rows
    ]


@given(rows=ROWS, others=ROWS, data=st.data())
def test_rows_are_replaced(rows: list[list[int]], others: list[list[int]], data: Any) -> None:
    others = others[: len(rows)]
    chosen = data.draw(st.permutations(range(len(rows))))[: len(others)]
    numbers = sorted(chosen)
    expected = list(rows)
    for number, row in zip(numbers, others, strict=True):
        expected[number] = row
    assert as_lists(replace_rows(flatten(rows), numbers, others)) == expected


class Twice:
    """A library whose post-processor says everything twice."""

    post_processor = "twice"

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        ids = list(text.encode())
        return SimpleNamespace(ids=ids * 2 if add_special_tokens else ids)


def test_what_a_post_processor_puts_around() -> None:
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "pair": single * 2,
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3, 4], "tokens": ["<s>", "<s>"]}},
    }
    around = library(post_processor=template | {"single": [start, *single, start, start]})
    assert tokens_around(library()) == ((), ())
    assert tokens_around(around) == ((3, 4), (3, 4, 3, 4))
    assert tokens_around(cast(Library, Twice())) is None
