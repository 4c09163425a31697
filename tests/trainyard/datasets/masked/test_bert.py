"""BERT samples: laws, and the trimming written out slowly."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.datasets.masked.sentence_files import SPECIAL, VOCABULARY, write_sentences
from tests.trainyard.tokenizers.kinds import build
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.index_cache import IndexCache
from trainyard.datasets.masked.bert import BERTDataset, BertFormat, trim
from trainyard.datasets.masked.config import MaskedConfig
from trainyard.errors import ConfigError, DataError

CLS, SEP, MASK, PAD = 1, 2, 3, 5
BEGINS = np.arange(VOCABULARY) % 4 > 0
TOKENIZER = SimpleNamespace(
    cls=CLS, sep=SEP, mask=MASK, pad=PAD, vocab_size=VOCABULARY, begins_word=BEGINS
)


def sample_format(seq_length: int = 64, binary_head: bool = True) -> BertFormat:
    return BertFormat.of(TOKENIZER, MaskedConfig(), seq_length, 1234, binary_head)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write_sentences(tmp_path_factory.mktemp("bert") / "text_sentence", 200)


def original(item: dict[str, np.ndarray]) -> np.ndarray:
    """The text before any word of it was hidden."""
    text = np.where(item["labels"] >= 0, item["labels"], item["text"])
    return text[item["padding_mask"] > 0]


def parts(item: dict[str, np.ndarray]) -> tuple[list[int], list[int]]:
    """A and B without their marks."""
    text, types = original(item), item["types"][item["padding_mask"] > 0]
    assert (text[0], text[types == 0][-1], text[-1]) == (CLS, SEP, SEP)
    return text[types == 0][1:-1].tolist(), text[types == 1][:-1].tolist()


@pytest.mark.parametrize("seq_length", [24, 64, 512])
def test_both_parts_are_neighbouring_sentences(sentences: IndexedDataset, seq_length: int) -> None:
    dataset = BERTDataset(sentences, range(200), None, sample_format(seq_length))
    truncated = 0
    for index in range(len(dataset)):
        item, run = dataset[index], dataset.samples.sentences(index)
        first, second = parts(item)
        if item["is_random"]:
            first, second = second, first
        whole = [sentences.get(i).tolist() for i in run]
        pivots = [(flat(whole[:k]), flat(whole[k:])) for k in range(1, len(whole))]
        truncated += int(item["truncated"])
        if not item["truncated"]:
            assert (first, second) in pivots
            continue
        assert len(first) + len(second) == dataset.samples.target_length(index)
        assert any(is_within(first, a) and is_within(second, b) for a, b in pivots)
    assert truncated < len(dataset)


def flat(runs: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(runs))


def is_within(part: list[int], whole: list[int]) -> bool:
    return any(whole[k : k + len(part)] == part for k in range(len(whole) - len(part) + 1))


def test_shapes_padding_and_masks_agree(sentences: IndexedDataset) -> None:
    dataset = BERTDataset(sentences, range(200), None, sample_format())
    for index in range(0, len(dataset), 7):
        item = dataset[index]
        filled = int(item["padding_mask"].sum())
        assert item["padding_mask"][:filled].all()
        assert (item["text"][filled:] == PAD).all()
        assert not item["types"][filled:].any()
        assert np.array_equal(item["loss_mask"] > 0, item["labels"] >= 0)
        assert item["loss_mask"].sum() <= 0.15 * dataset.samples.target_length(index)
        for key in ("text", "types", "labels", "padding_mask"):
            assert item[key].dtype == np.int64
            assert item[key].shape == (64,)


def test_an_item_is_the_same_in_any_order_of_access(sentences: IndexedDataset) -> None:
    dataset = BERTDataset(sentences, range(200), 900, sample_format())
    assert len(dataset) >= 900
    order = np.random.RandomState(1).permutation(60).tolist()
    shuffled = {index: dataset[index] for index in order}
    again = pickle.loads(pickle.dumps(BERTDataset(sentences, range(200), 900, sample_format())))
    for index in range(60):
        item = again[index]
        assert all(np.array_equal(item[key], shuffled[index][key]) for key in item)


def test_a_cached_mapping_is_the_right_one(sentences: IndexedDataset, tmp_path: Path) -> None:
    cache = IndexCache(str(tmp_path / "cache"))
    for documents, form_ in (
        (range(200), sample_format()),
        (range(90), sample_format()),
        (range(200), sample_format(32)),
    ):
        made = BERTDataset(sentences, documents, None, form_)
        for _ in range(2):
            kept = BERTDataset(sentences, documents, None, form_, cache)
            assert np.array_equal(kept.samples.rows, made.samples.rows)
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 3


def test_without_the_binary_head_there_is_one_part(sentences: IndexedDataset) -> None:
    dataset = BERTDataset(sentences, range(200), None, sample_format(binary_head=False))
    item = dataset[0]
    assert not item["types"].any()
    assert not item["is_random"]
    assert (original(item) == SEP).sum() == 1


def test_half_the_pairs_are_swapped(sentences: IndexedDataset) -> None:
    dataset = BERTDataset(sentences, range(200), None, sample_format())
    swapped = [int(dataset[index]["is_random"]) for index in range(len(dataset))]
    assert 0.4 < np.mean(swapped) < 0.6


def test_trimming_is_token_by_token_from_the_longer_part() -> None:
    for seed in range(60):
        sizes = np.random.RandomState(seed).randint(1, 30, 2)
        first, second = np.arange(sizes[0]), 100 + np.arange(sizes[1])
        target = 2 + seed % 20
        a, b, random = first.tolist(), second.tolist(), np.random.RandomState(seed)
        while len(a) + len(b) > target:
            part = a if len(a) > len(b) else b
            del part[0 if random.random_sample() < 0.5 else -1]
        cut = trim(first, second, target, np.random.RandomState(seed))
        assert [part.tolist() for part in cut] == [a, b]


def test_items_are_numbered_for_the_ledger(sentences: IndexedDataset) -> None:
    dataset = BERTDataset(sentences, range(200), None, sample_format())
    assert dataset.ids(np.array([5, 2])).tolist() == [[0, 5], [0, 2]]
    assert dataset.numbers(slice(2, 5)).tolist() == [2, 3, 4]


def test_only_the_documents_of_the_split_are_used(sentences: IndexedDataset) -> None:
    dataset = BERTDataset(sentences, range(50, 60), None, sample_format())
    first, end = sentences.document_indices[[50, 60]].tolist()
    assert dataset.samples.rows[:, 0].min() >= first
    assert dataset.samples.rows[:, 1].max() <= end


def test_a_token_outside_the_vocabulary_is_named_with_its_place(sentences: IndexedDataset) -> None:
    small = BertFormat(
        seq_length=64, seed=1, vocab_size=SPECIAL, cls=CLS, sep=SEP, mask=MASK, pad=PAD
    )
    with pytest.raises(DataError, match=r"text_sentence: token \d+ in one of the sequences"):
        BERTDataset(sentences, range(200), None, small)[0]


def test_a_tokenizer_without_marks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no sep token, which BERT needs"):
        BertFormat.of(SimpleNamespace(cls=1, sep=None), MaskedConfig(), 64, 1)
    wordless = SimpleNamespace(cls=1, sep=2, mask=3, pad=0, vocab_size=9)
    with pytest.raises(ConfigError, match="which of its tokens begin a word"):
        BertFormat.of(wordless, MaskedConfig(), 64, 1)
    with pytest.raises(ConfigError, match="--seq-length 4"):
        sample_format(4)
    empty = write_sentences(tmp_path / "empty", 0)
    with pytest.raises(DataError, match="empty: none of the 0 documents"):
        BERTDataset(empty, range(0), None, sample_format())


@pytest.mark.parametrize("kind", ["uncased", "cased"])
def test_words_of_real_text_are_hidden_whole(shared: Path, tmp_path: Path, kind: str) -> None:
    tokenizer: Any = build(shared, f"bert-{kind}")
    with open(shared / "data" / "corpora" / "multilingual_mix.jsonl", encoding="utf-8") as lines:
        texts = [json.loads(next(lines))["text"][:2000].split("\n") for _ in range(40)]
    docs = [[tokenizer.encode(line) for line in text if line.strip()] for text in texts]
    indexed = IndexedDataset(write_tokens(tmp_path / "s", docs))
    dataset = BERTDataset(indexed, range(40), 60, BertFormat.of(tokenizer, MaskedConfig(), 128, 1))
    for index in range(60):
        item = dataset[index]
        text, asked = original(item), item["labels"] >= 0
        for place in np.flatnonzero(asked[: len(text)]).tolist():
            for near in (place - 1, place + 1):
                later = max(near, place)
                if near < len(text) and tokenizer.decode([text[later]]).startswith("##"):
                    assert asked[near] or text[near] in (tokenizer.cls, tokenizer.sep)
