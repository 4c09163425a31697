"""From samples to documents and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.corpus.token_files import write_tokens
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.blend import blend
from trainyard.datasets.gpt import BlendedDataset, GPTDataset, SampleFormat
from trainyard.datasets.trace import DocumentPiece, Occurrences, pieces
from trainyard.errors import ConfigError


def write_documents(prefix: Path, documents: list[list[int]], first: int = 0) -> IndexedDataset:
    """documents: lengths of the sequences of each; every token of the file is another one."""
    token, docs = first, []
    for lengths in documents:
        ends = token + np.cumsum(lengths, dtype=np.int64)
        docs.append([np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)])
        token = int(ends[-1]) if lengths else token
    return IndexedDataset(write_tokens(prefix, docs, np.int32))


def tokens_of(indexed: IndexedDataset, piece: DocumentPiece) -> list[int]:
    first, last = indexed.document_indices[piece.document : piece.document + 2].tolist()
    parts = [indexed.get(i) for i in range(first, last)]
    whole = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return whole[piece.begin : piece.end].tolist()


def dataset_of(
    indexed: IndexedDataset, num_samples: int | None, **sample_format: Any
) -> GPTDataset:
    shape = SampleFormat(seq_length=8, seed=3, vocab_size=10**6, eod=0, **sample_format)
    ids = np.arange(len(indexed), dtype=np.int32)
    return GPTDataset(indexed, ids, num_samples, shape, drop_last_partial=False)


DOCUMENTS = st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=1, max_size=12).filter(
    lambda documents: sum(map(sum, documents)) > 9
)


@pytest.mark.slow
@given(documents=DOCUMENTS, num_samples=st.none() | st.integers(1, 30), extra=st.booleans())
@settings(max_examples=40, deadline=None)
def test_pieces_are_the_tokens_of_a_sample_and_occurrences_their_inverse(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    num_samples: int | None,
    extra: bool,
) -> None:
    indexed = write_documents(tmp_path_factory.mktemp("t") / "p", documents)
    dataset = dataset_of(indexed, num_samples, extra_token=extra)
    found = [piece for sample in range(len(dataset)) for piece in pieces(dataset, sample)]
    for sample in range(len(dataset)):
        text: list[int] = []
        for piece in pieces(dataset, sample):
            assert piece.sample == sample
            assert piece.at == len(text)
            assert piece.begin < piece.end
            text += tokens_of(indexed, piece)
        assert text == dataset.text(sample)[: len(text)].tolist()
        assert (dataset.text(sample)[len(text) :] == -1).all()
    everything = np.arange(indexed.num_documents)
    assert list(Occurrences(dataset, {indexed.prefix: everything})) == found
    for document in everything.tolist():
        expected = [piece for piece in found if piece.document == document]
        assert list(Occurrences(dataset, {indexed.prefix: np.array([document])})) == expected
    assert list(Occurrences(dataset, {indexed.prefix: everything[:0]})) == []


def test_blends_are_resolved_both_ways(tmp_path: Path) -> None:
    files = [
        write_documents(tmp_path / "a", [[7], [30, 2], [], [11]]),
        write_documents(tmp_path / "b", [[19]] * 6, first=1000),
    ]
    index, within = blend([0.3, 0.7], 40)
    counts = np.bincount(index)
    sources = [dataset_of(f, int(n) + 3) for f, n in zip(files, counts, strict=True)]
    dataset = BlendedDataset(sources, index, within)
    found = [piece for sample in range(len(dataset)) for piece in pieces(dataset, sample)]
    by_prefix = {indexed.prefix: indexed for indexed in files}
    for sample in range(len(dataset)):
        mine = [piece for piece in found if piece.sample == sample]
        text = [token for piece in mine for token in tokens_of(by_prefix[piece.prefix], piece)]
        assert text[:-1] == dataset[sample]["tokens"].tolist()
    every = {indexed.prefix: np.arange(indexed.num_documents) for indexed in files}
    assert list(Occurrences(dataset, every)) == found
    one = Occurrences(dataset, {files[0].prefix: np.array([1])})
    expected = [p for p in found if (p.prefix, p.document) == (files[0].prefix, 1)]
    assert one[:] == expected
    assert [one[k] for k in range(len(one))] == expected
    assert one.samples.tolist() == [piece.sample for piece in expected]
    with pytest.raises(IndexError):
        one[len(one)]
    with pytest.raises(ConfigError, match="0 to 39"):
        pieces(dataset, 40)
