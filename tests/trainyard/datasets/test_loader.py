"""Tokens that come from afar are asked for before they are needed, once, and side by side."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.datasets.masked.sentence_files import VOCABULARY, write_sentences
from trainyard.artifacts import store
from trainyard.corpus.indexed import CacheOptions, IndexedDataset, Reader
from trainyard.datasets.config import DataConfig
from trainyard.datasets.fim import FIMDataset
from trainyard.datasets.fim_config import FimConfig
from trainyard.datasets.gpt import BlendedDataset, GPTDataset
from trainyard.datasets.loader import build_loader, load
from trainyard.datasets.masked.bert import BERTDataset, BertFormat
from trainyard.datasets.sample_format import SampleFormat
from trainyard.datasets.sampler import SamplerShape
from trainyard.errors import DataError

BLOCK = 256
SEQ = 63
"""64 tokens of 2 bytes with the one behind: half a block, so that a sample is in one or two."""


class Requests:
    """What the store is asked for, in whichever process, and how many at once."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0
        self._read = store.read_range

    def __call__(self, url: str, start: int, end: int, version: str | None = None) -> bytes:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        with self._log.open("a") as log:
            log.write(f"{start}\n")
        time.sleep(0.02)  # or one is done before the next has begun
        with self._lock:
            self._now -= 1
        return self._read(url, start, end, version)

    @property
    def made(self) -> list[int]:
        """Where each one began."""
        return [int(line) for line in self._log.read_text().split()] if self._log.exists() else []

    def settled(self) -> list[int]:
        """The same, once nothing is under way any more."""
        while True:
            before = self.made
            time.sleep(0.08)
            if self._now == 0 and self.made == before:
                return before


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Requests:
    requests = Requests(tmp_path / "requests")
    monkeypatch.setattr(store, "read_range", requests)
    return requests


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    documents = [[list(range(n, n + 50))] for n in range(60)]
    return write_tokens(tmp_path / "tokens", documents)


def opened(prefix: str, folder: Path, reader: Reader = "ranged") -> IndexedDataset:
    return IndexedDataset(prefix, reader, CacheOptions(folder, 1 << 20, BLOCK, blocks_ahead=0))


def samples(indexed: IndexedDataset) -> GPTDataset:
    sample_format = SampleFormat(seq_length=SEQ, seed=1, vocab_size=200, eod=199)
    return GPTDataset(indexed, np.arange(len(indexed), dtype=np.int32), None, sample_format)


def blocks_of(dataset: GPTDataset, indices: list[int]) -> set[int]:
    """Where the blocks begin that hold some samples."""
    offsets, found = dataset.indexed.index.sequence_offsets, set()
    for index in indices:
        for document, offset, length in dataset._pieces(index):
            first = int(offsets[document]) + 2 * offset
            found |= {n * BLOCK for n in range(first // BLOCK, -(-(first + 2 * length) // BLOCK))}
    return found


def test_blocks_are_fetched_in_parallel(tokens: str, tmp_path: Path, requests: Requests) -> None:
    dataset = samples(opened(tokens, tmp_path / "cache"))
    (batch,) = load(dataset, DataConfig(data_path=("x",), num_workers=0), [[3, 7, 11, 15]])
    assert sorted(requests.made) == sorted(blocks_of(dataset, [3, 7, 11, 15]))
    assert requests.most > 1
    mapped = samples(opened(tokens, tmp_path, "mmap"))
    (expected,) = load(mapped, DataConfig(data_path=("x",), num_workers=0), [[3, 7, 11, 15]])
    assert all(torch.equal(batch[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_the_next_batch_is_prefetched(tokens: str, tmp_path: Path, requests: Requests) -> None:
    dataset = samples(opened(tokens, tmp_path / "cache"))
    data = DataConfig(data_path=("x",), num_workers=0)
    batches = build_loader(dataset, data, SamplerShape(len(dataset), 4, 1), 0, 0)
    for k in range(3):
        next(batches)
        expected = blocks_of(dataset, list(range(4 * (k + 2))))
        assert sorted(requests.settled()) == sorted(expected), k


def test_workers_fetch_their_own_batches(tokens: str, tmp_path: Path, requests: Requests) -> None:
    dataset = samples(opened(tokens, tmp_path / "cache"))
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    batches = list(load(dataset, DataConfig(data_path=("x",), num_workers=1), groups))
    assert len(batches) == 2
    assert sorted(requests.made) == sorted(blocks_of(dataset, list(range(8))))


def kinds_of(tokens: str, sentences: str, folder: Path, reader: Reader) -> dict[str, Any]:
    text = samples(opened(tokens, folder, reader))
    first = np.zeros(8, np.int16)
    bert = BertFormat(seq_length=64, seed=1, vocab_size=VOCABULARY, cls=1, sep=2, mask=3, pad=5)
    marks = SimpleNamespace(eod=199, encode=lambda text: [1], decode=lambda ids: "<fim>")
    names = ("prefix", "middle", "suffix", "pad")
    fim = FimConfig(fim_data=True, **{f"fim_{name}_token": "<fim>" for name in names})
    return {
        "blend": BlendedDataset([text], first, np.arange(8)),
        "fim": FIMDataset(text, fim, marks),
        "bert": BERTDataset(opened(sentences, folder, reader), range(40), None, bert),
    }


@pytest.mark.parametrize("kind", ["blend", "fim", "bert"])
def test_each_kind_prefetches(tokens: str, tmp_path: Path, requests: Requests, kind: str) -> None:
    sentences = write_sentences(tmp_path / "sentences", 40).prefix
    dataset = kinds_of(tokens, sentences, tmp_path / "cache", "ranged")[kind]
    dataset.prefetch([2, 5])
    found = requests.settled()
    assert len(found) > 1
    assert [len(dataset[index]) > 0 for index in (2, 5)] == [True, True]
    assert requests.made == found  # nothing was left to fetch


@pytest.mark.parametrize("kind", ["blend", "fim", "bert"])
def test_what_is_mapped_is_not_announced(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sentences = write_sentences(tmp_path / "sentences", 40).prefix
    dataset = kinds_of(tokens, sentences, tmp_path / "cache", "mmap")[kind]
    monkeypatch.setattr(IndexedDataset, "prefetch", None)
    dataset.prefetch([1, 2])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_the_data_keeps_its_message_in_a_worker(workers: int) -> None:
    class Faulty:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 5:
                raise DataError("t: token 7 in document 3")
            return {"tokens": np.array([index])}

        def ids(self, indices: Any) -> Any:
            return indices

    data = DataConfig(data_path=("none",), num_workers=workers)
    batches = load(Faulty(), data, [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert [next(batches)["tokens"].tolist() for _ in range(2)] == [[[0], [1]], [[2], [3]]]
    with pytest.raises(DataError) as found:
        next(batches)
    assert str(found.value) == "t: token 7 in document 3"
