"""Fill-in-the-middle: the characters of each text stay, in any order of access."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.tokenizers.kinds import build
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.fim import (
    MIN_TOKENS,
    FIMDataset,
    Rearrangement,
    joined,
    split_at,
    token_id,
)
from trainyard.datasets.fim_config import FimConfig
from trainyard.datasets.gpt import GPTDataset, SampleFormat
from trainyard.errors import ConfigError

SPECIAL = ["<eod>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file>", "<bos>"]
EOD, PREFIX, MIDDLE, SUFFIX, PAD, FILE, BOS = range(7)
ALWAYS = FimConfig(fim_rate=1.0)
TEXTS = [
    "def f():\n    return 1\n",
    "x",
    "",
    "\u00dcbermut tut selten gut. ",
    "\u6570\u5b66\u306f\u697d\u3057\u3044\u3002" * 3,
]


class ByteTokenizer:
    """A byte is a token, as in byte-level BPE before any merge."""

    eod = EOD

    def __init__(self, bos: bool = False) -> None:
        self._before = [BOS] if bos else []

    def encode(self, text: str) -> list[int]:
        ids = list(self._before)
        for piece in re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text):
            ids += [SPECIAL.index(piece)] if piece in SPECIAL else [7 + b for b in piece.encode()]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        pieces = (bytes([i - 7]) if i >= 7 else SPECIAL[i].encode() for i in ids)
        return b"".join(pieces).decode(errors="replace")


def put_together(tokens: list[int]) -> list[int]:
    """Prefix, middle and suffix in their order, of one text in either sample_format."""
    if PREFIX not in tokens:
        return tokens
    assert tokens[0] == PREFIX
    assert tokens.count(SUFFIX) == tokens.count(MIDDLE) == 1
    suffix, middle = tokens.index(SUFFIX), tokens.index(MIDDLE)
    if suffix == 1:  # the rest is prefix and middle, which follow each other
        return tokens[middle + 1 :] + tokens[2:middle]
    return tokens[1:suffix] + tokens[middle + 1 :] + tokens[suffix + 1 : middle]


def rearranged(tokens: list[int], config: FimConfig, seed: int = 0) -> list[int]:
    return Rearrangement(config, ByteTokenizer())(tokens, np.random.RandomState(seed))


@pytest.mark.parametrize("spm", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("bos", [False, True])
def test_the_parts_of_every_text_put_together_are_the_text(spm: float, bos: bool) -> None:
    rule = Rearrangement(replace(ALWAYS, fim_spm_rate=spm), ByteTokenizer(bos))
    tokens = ByteTokenizer().encode("<eod>".join(TEXTS))
    psm = 0
    for seed in range(50):
        found = split_at(rule(tokens, np.random.RandomState(seed)), EOD)
        assert [put_together(text) for text in found] == split_at(tokens, EOD)
        psm += sum(PREFIX in text and text[1] != SUFFIX for text in found)
        assert [PREFIX in text for text in found] == [len(t) >= MIN_TOKENS for t in TEXTS]
    assert (psm > 0) == (spm < 1)


def test_a_text_cut_within_a_character_keeps_its_bytes() -> None:
    tokens = ByteTokenizer().encode(TEXTS[-1])
    for first in range(3):
        for last in range(3):
            cut = tokens[first : len(tokens) - last]
            found = rearranged(cut, ALWAYS, seed=first)
            assert PREFIX in found
            assert put_together(found) == cut
    broken = [7 + 0x80] * 9  # no text at all: nothing can be kept by characters
    assert sorted(rearranged(broken, FimConfig(fim_rate=0.0))) == broken


@pytest.mark.slow
def test_shares_of_texts_and_of_forms_are_those_asked_for() -> None:
    tokens = ByteTokenizer().encode("some words in a row")
    found = [rearranged(tokens, FimConfig(fim_spm_rate=0.25), seed) for seed in range(2000)]
    changed = [text for text in found if text != tokens]
    assert 0.46 < len(changed) / len(found) < 0.54
    spm = sum(text[1] == SUFFIX and text.index(MIDDLE) > 2 for text in changed)
    assert 0.18 < spm / len(changed) < 0.32


def test_cuts_fall_on_every_character() -> None:
    tokens = ByteTokenizer().encode("abcd")
    lengths = {
        rearranged(tokens, replace(ALWAYS, fim_spm_rate=0.0), s).index(SUFFIX) - 1
        for s in range(200)
    }
    assert lengths == {0, 1, 2, 3, 4}


def test_files_of_a_text_are_rearranged_by_themselves() -> None:
    config = replace(ALWAYS, fim_split_sample="<file>", fim_fragment_rate=0.5)
    tokens = ByteTokenizer().encode("<file>".join(["first file", "", "second file", "third"]))
    seen = set()
    for seed in range(40):
        files = split_at(rearranged(tokens, config, seed), FILE)
        assert [put_together(file) for file in files] == split_at(tokens, FILE)
        seen.add(tuple(PREFIX in file for file in files))
    assert len(seen) == 8
    untouched = replace(config, fim_rate=0.0, fim_fragment_rate=1.0)
    assert rearranged(tokens, untouched) == tokens


def test_a_text_with_the_unwanted_beginning_stays() -> None:
    config = replace(ALWAYS, fim_no_prefix="def")
    tokens = ByteTokenizer().encode(TEXTS[0])
    assert rearranged(tokens, config) == tokens
    assert rearranged(tokens[1:], config) != tokens[1:]


def test_splitting_and_joining_are_the_reverse_of_each_other() -> None:
    for tokens in ([], [0], [0, 0], [5, 0], [0, 5], [1, 0, 2, 3, 0, 0, 4]):
        assert joined(split_at(tokens, 0), 0) == tokens


# --- as a dataset -----------------------------------------------------------------------------


def texts(folder: Path, seq_length: int = 40, **options: bool) -> GPTDataset:
    tokenizer, random = ByteTokenizer(), np.random.RandomState(0)
    docs = []
    for _ in range(60):
        words = ["w\u00f6rd"[: random.randint(1, 5)] for _ in range(random.randint(1, 15))]
        docs.append([tokenizer.encode(" ".join(words) + "<eod>")])
    sample_format = SampleFormat(seq_length, seed=1234, vocab_size=263, eod=EOD, **options)
    indexed = IndexedDataset(write_tokens(folder / "t", docs))
    return GPTDataset(indexed, np.arange(60, dtype=np.int32), 150, sample_format)


def same(a: dict[str, NDArray], b: dict[str, NDArray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def test_a_sample_is_the_same_in_any_order_of_access(tmp_path: Path) -> None:
    plain = texts(tmp_path)
    config = FimConfig(fim_rate=0.9)
    dataset = FIMDataset(plain, config, ByteTokenizer())
    order = np.random.RandomState(1).permutation(len(dataset)).tolist()
    shuffled = {index: dataset[index] for index in order}
    again = FIMDataset(plain, config, ByteTokenizer())
    assert all(same(again[index], shuffled[index]) for index in range(len(again)))
    assert any(not np.array_equal(again.text(i), plain.text(i)) for i in range(20))
    assert np.array_equal(again.ids(np.arange(9)), plain.ids(np.arange(9)))
    assert len(again) == len(plain)


def test_a_sample_keeps_its_length_and_padding_does_not_count(tmp_path: Path) -> None:
    dataset = FIMDataset(texts(tmp_path), ALWAYS, ByteTokenizer())
    dataset._rearrange._encode = lambda text: [9]  # type: ignore[method-assign]  # much shorter
    item = dataset[0]
    assert item["tokens"].shape == (40,)
    assert (item["labels"] == PAD).any()
    assert np.array_equal(item["loss_mask"] == 0, item["labels"] == PAD)


def test_at_rate_0_the_samples_are_those_beneath(tmp_path: Path) -> None:
    plain = texts(tmp_path, reset_position_ids=True, inter_document_masking=True)
    dataset = FIMDataset(plain, FimConfig(fim_rate=0.0), ByteTokenizer())
    assert all(same(dataset[index], plain[index]) for index in range(len(plain)))


def test_tokens_that_are_not_there_and_rates_that_are_none_are_refused() -> None:
    assert token_id(ByteTokenizer(bos=True), "<fim_pad>", "--fim-pad-token") == PAD
    with pytest.raises(ConfigError, match="--fim-middle-token '<mid>' is not a token"):
        Rearrangement(FimConfig(fim_middle_token="<mid>"), ByteTokenizer())
    with pytest.raises(ConfigError, match="--fim-spm-rate must be from 0 to 1"):
        FimConfig(fim_spm_rate=1.5)
    with pytest.raises(ConfigError, match="--fim-fragment-rate go together"):
        FimConfig(fim_split_sample="<file>")
    with pytest.raises(ConfigError, match="must not be empty"):
        FimConfig(fim_no_prefix="")


@pytest.mark.slow
def test_real_text_of_many_languages_survives_gpt2(shared: Path) -> None:
    tokenizer = build(shared, "gpt2")
    config = FimConfig(  # four tokens that no text has
        fim_rate=1.0,
        fim_prefix_token=" SolidGoldMagikarp",
        fim_middle_token=" RandomRedditor",
        fim_suffix_token=" TheNitrome",
        fim_pad_token=" guiActiveUn",
    )
    rule = Rearrangement(config, tokenizer)
    marks = {rule.marks.prefix: PREFIX, rule.marks.middle: MIDDLE, rule.marks.suffix: SUFFIX}
    corpus = shared / "data" / "corpora" / "multilingual_mix.jsonl"
    with open(corpus, encoding="utf-8") as lines:
        documents = [json.loads(next(lines))["text"][:3000] for _ in range(30)]
    for seed, text in enumerate(documents):
        tokens = tokenizer.encode(text)[seed % 7 : 500 - seed % 5]
        found = rule(tokens, np.random.RandomState(seed))
        whole = put_together([marks.get(token, token + 10) for token in found])
        assert PREFIX in [marks.get(token) for token in found]
        assert tokenizer.decode([token - 10 for token in whole]) == tokenizer.decode(tokens)
