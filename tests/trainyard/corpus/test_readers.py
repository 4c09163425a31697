"""Mapped, from the file or in ranges, by threads, forks and copies: the same tokens."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.corpus.token_files import Documents, write_tokens
from trainyard.artifacts import store
from trainyard.corpus.indexed import CacheOptions, IndexedDataset, Reader
from trainyard.errors import ArtifactError, ConfigError

pytestmark = pytest.mark.slow

READERS = ("mmap", "file", "ranged", "fetch")


@settings(max_examples=30, deadline=None)
@given(
    docs=st.lists(st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=3), max_size=6),
    places=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(0, 9))),
    block_bytes=st.integers(1, 40),
)
def test_all_readers_give_the_same_tokens(
    docs: Documents,
    places: list[tuple[int, int, int]],
    block_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("readers")
    prefix = write_tokens(folder / "p", docs, np.int32)
    cache = CacheOptions(folder / "cache", max_bytes=200, block_bytes=block_bytes)
    sequences = [sequence for doc in docs for sequence in doc]
    for reader in READERS:
        dataset = IndexedDataset(prefix, reader, cache)
        assert [[s.tolist() for s in doc] for doc in dataset.documents()] == docs
        for i, offset, length in places if sequences else ():
            whole = sequences[i % len(sequences)]
            offset = min(offset, len(whole))
            length = min(length, len(whole) - offset)
            piece = (i % len(sequences), offset, length)
            dataset.prefetch([piece])
            assert dataset.get(*piece).tolist() == whole[offset : offset + length]


@pytest.mark.parametrize("reader", ["auto", "ranged", "fetch"])
def test_threads_forks_and_pickles_can_read(reader: Reader, s3_url: str, tmp_path: Path) -> None:
    docs = [[list(range(n, n + 50))] for n in range(40)]
    prefix = write_tokens(store.join(s3_url, "tokens"), docs)
    dataset = IndexedDataset(prefix, reader, CacheOptions(tmp_path, 4096, 512))

    def check(seed: int, dataset: IndexedDataset = dataset) -> None:
        for i in np.random.default_rng(seed).integers(0, 40, 30).tolist():
            assert dataset.get(i, 3, 20).tolist() == list(range(i + 3, i + 23))

    check(0)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    check(1, pickle.loads(pickled))
    child = multiprocessing.get_context("fork").Process(target=check, args=(2,))
    child.start()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(check, range(3, 6)))
    child.join(60)
    assert child.exitcode == 0


def test_a_reader_for_local_files_is_refused_for_remote_ones(s3_url: str) -> None:
    prefix = write_tokens(store.join(s3_url, "tokens"), [[[1]]])
    with pytest.raises(ConfigError, match=r"tokens\.bin: the reader 'file' is for local files"):
        IndexedDataset(prefix, "file")


def test_a_file_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "p", [[list(range(100))]])
    for reader in ("file", "ranged"):
        dataset = IndexedDataset(prefix, reader, CacheOptions(tmp_path / "c"))
        os.truncate(prefix + ".bin", 150)
        with pytest.raises(ArtifactError, match=r"p\.bin"):
            dataset.get(0)
        write_tokens(tmp_path / "p", [[list(range(100))]])
