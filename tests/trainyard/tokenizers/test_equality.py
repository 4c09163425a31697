"""Every type makes the ids of its reference library: of hostile text, and of whole corpora."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.tokenizers.hostile import (
    HOSTILE,
    assert_equal,
    blocks,
    corpora_slice,
    corpus,
    every_block,
    random_texts,
    small_corpora,
    whole_corpora,
)
from tests.trainyard.tokenizers.kinds import FAST, OPTIONS, build, options, reference
from trainyard.tokenizers.base import Tokenizer, as_lists
from trainyard.tokenizers.bytelevel import ByteLevelTokenizer
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.fast import seams

pytestmark = pytest.mark.slow
Built = dict[str, Tokenizer]
KINDS = sorted(OPTIONS)
SOME_KINDS = [kind for kind in KINDS if kind != "bert-chinese"]
LARGEST = "corpus_en.jsonl"
UNBROKEN = (
    *("a", "ACGT", "the", string.digits, "-", string.punctuation, " ", " \n", "\u4f60\u597d\u4e16"),
    *("\U0001f600", "\u043f\u0440\u0438", "\u00e9e\u0301", string.printable),
)


@pytest.fixture(scope="module")
def built(shared: Path) -> Built:
    return {kind: build(shared, kind) for kind in KINDS}


# --- in the unit suite ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_hostile_text(built: Built, shared: Path, kind: str) -> None:
    texts = [*HOSTILE, *every_block(step=5)[::5], *random_texts(80)]
    assert_equal(built[kind], reference(shared, kind), texts)
    texts = texts[::17]
    assert built[kind].encode_batch(texts) == [built[kind].encode(text) for text in texts]
    assert built[kind].encode_batch(texts) == list(map(built[kind].encode_reference, texts))


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_corpora_slice(built: Built, shared: Path, kind: str) -> None:
    assert_equal(built[kind], reference(shared, kind), corpora_slice(shared))


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_long_texts(built: Built, shared: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "PART_LETTERS", 300)
    rng = random.Random(0)
    rows = ["".join(rng.choices(letters, k=1500)) for letters in UNBROKEN]
    texts = [*rows, " ".join(rows), *(f"Go: {row}'s end, {row}\u0378{row}" for row in rows), "x"]
    assert_equal(built[kind], reference(shared, kind), texts)


def test_gigatoken_encodes_where_it_can(built: Built, shared: Path) -> None:
    for kind, tokenizer in built.items():
        assert tokenizer.engine.split()[0] == ("gigatoken" if kind in FAST else "tokenizers")
        assert tokenizer.releases_gil == (kind not in FAST and not kind.startswith("bert"))
    plain = build(shared, "gpt2", use_gigatoken=False)
    assert plain.engine.startswith("tokenizers ")
    assert plain.releases_gil
    assert plain.encode_batch(HOSTILE) == built["gpt2"].encode_batch(HOSTILE)


@pytest.mark.parametrize("letter", ["a", "1", " ", "\u4f60", "<|endoftext|>", "ab "])
def test_a_line_of_a_megabyte(built: Built, letter: str) -> None:
    line = letter * ((1 << 20) // len(letter.encode()))
    ids, bounds = built["gpt2"].encode_flat([line, "x"])
    assert bounds.tolist() == [0, len(ids) - 1, len(ids)]
    assert built["gpt2"].decode(ids[:-1].tolist()) == line
    if letter == "ab ":
        assert ids[:-1].tolist() == built["gpt2"].encode_reference(line)


def test_wordpiece_is_transformers_bert(built: Built, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    texts = [*HOSTILE, *random_texts(100, seed=2)]
    for kind in ("bert-uncased", "bert-cased"):
        for name, data in built[kind].files().items():
            (tmp_path / name).write_bytes(data)
        theirs = transformers.BertTokenizerFast.from_pretrained(tmp_path)
        expected = theirs(texts, add_special_tokens=False).input_ids
        assert built[kind].encode_batch(texts) == expected


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(), max_size=8))
def test_decoding_returns_the_encoded_text(built: Built, texts: list[str]) -> None:
    bytelevel = ByteLevelTokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    for tokenizer in (built["gpt2"], bytelevel):
        ids, bounds = tokenizer.encode_flat(texts)
        assert (ids.dtype, bounds.dtype) == (np.uint32, np.int64)
        rows = as_lists((ids, bounds))
        assert [tokenizer.decode(row) for row in rows] == texts
        assert rows == [tokenizer.encode(text) for text in texts]


# --- whole corpora ----------------------------------------------------------------------------

STEPS = {"gpt2": 10, "neox": 10, "llama": 50, "bert-uncased": 20, "bert-cased": 25}
"""One document of so many: the references take 20 s for 56 MB, that of llama minutes."""


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_blocks_and_small_corpora(built: Built, shared: Path, kind: str) -> None:
    assert_equal(built[kind], reference(shared, kind), every_block() + random_texts(1000, seed=4))
    for texts in small_corpora(shared, STEPS[kind], 4 if kind == "llama" else 1):
        assert_equal(built[kind], reference(shared, kind), texts)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_corpora(built: Built, shared: Path, kind: str) -> None:
    for texts in whole_corpora(shared):
        assert_equal(built[kind], reference(shared, kind), texts)


@pytest.mark.full
def test_the_whole_of_transformers_gpt2(built: Built, shared: Path) -> None:
    transformers = pytest.importorskip("transformers")
    files = options(shared, "gpt2")
    theirs = transformers.GPT2TokenizerFast(
        vocab=json.loads(Path(files["vocab_file"]).read_text()),
        merges=[
            tuple(line.split(" "))
            for line in Path(files["merge_file"]).read_text().split("\n")[1:]
            if line
        ],
    )
    for block in blocks(corpus(shared / "data/corpora" / LARGEST)):
        assert built["gpt2"].encode_batch(block) == theirs(block).input_ids
