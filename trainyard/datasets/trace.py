"""Traces samples of a run to the documents that they consist of, and back.

A sample consists of pieces of documents; `pieces` and `Occurrences` are inverses. `serving_order`
finds when and where a sample is served, `corpus.provenance` where a document came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.gpt import BlendedDataset, GPTDataset
from trainyard.errors import ConfigError

Ints = NDArray[np.int64]


@runtime_checkable
class DocumentFile(Protocol):
    """Token files with documents: an `IndexedDataset`, of which only the index is read."""

    @property
    def prefix(self) -> str:
        """Its name in messages."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """(S,) tokens of each sequence."""

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """(D,) sequence at each document bound."""

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """A run of tokens of one document in one sample."""

    sample: int
    """Number of the sample in the dataset of the run."""
    prefix: str
    """Prefix of the token files."""
    document: int
    begin: int
    end: int
    """Tokens [begin, end) of the document, over all its sequences."""
    at: int
    """Place in the sample of the first of them."""


def pieces(dataset: GPTDataset | BlendedDataset, sample: int) -> list[DocumentPiece]:
    """The pieces of a sample in order, including its last label."""
    if not 0 <= sample < len(dataset):
        raise ConfigError(f"--sample {sample}: the samples of this run are 0 to {len(dataset) - 1}")
    source, within = _source(dataset, sample)
    number = int(source.indices.shuffle_index[within])
    first, last = source.indices.sample_index[number : number + 2, 0].tolist()
    positions = np.arange(first, last + 1, dtype=np.int64)
    found = _Found.of(source, np.full(len(positions), number, np.int64), positions)
    return [found.piece(k, sample) for k in range(len(found.numbers))]


def files_of(dataset: GPTDataset | BlendedDataset) -> list[DocumentFile]:
    """The token files of a dataset; ConfigError for mock data, which has none."""
    return [_file(source) for source, _ in _sources(dataset)]


class Occurrences(Sequence[DocumentPiece]):
    """Every piece of some documents in the samples of a run, in order. Pieces are made on access,
    since there may be millions."""

    def __init__(
        self,
        dataset: GPTDataset | BlendedDataset,
        documents: Mapping[str, NDArray[np.int64]],
    ) -> None:
        """documents: numbers by the prefix of their token files."""
        self._found: list[_Found] = []
        samples, which, places = [], [], []
        for source, served in _sources(dataset):
            wanted = documents.get(source.indexed.prefix)
            if wanted is None or not len(wanted):
                continue
            numbers, positions = _samples_with(source, _positions(source, wanted))
            found = _Found.of(source, numbers, positions)
            as_served = _served_as(source, served)[found.numbers]
            shown = np.flatnonzero(
                as_served >= 0
            )  # a blend holds a few samples that it never serves
            samples.append(as_served[shown])
            places.append(shown)
            which.append(np.full(len(shown), len(self._found)))
            self._found.append(found)
        self.samples: Ints = np.concatenate(samples) if samples else np.empty(0, np.int64)
        """Sample of each piece."""
        order = np.argsort(
            self.samples, kind="stable"
        )  # those of one sample stand in order already
        self.samples = self.samples[order]
        self._which = np.concatenate(which)[order] if which else np.empty(0, np.int64)
        self._places = np.concatenate(places)[order] if places else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, k: int) -> DocumentPiece: ...

    @overload
    def __getitem__(self, k: slice) -> list[DocumentPiece]: ...

    def __getitem__(self, k: int | slice) -> DocumentPiece | list[DocumentPiece]:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        if not -len(self) <= k < len(self):
            raise IndexError(k)
        found = self._found[int(self._which[k])]
        return found.piece(int(self._places[k]), int(self.samples[k]))


@dataclass(frozen=True, slots=True)
class _Found:
    """Pieces of one source as arrays, empty ones left out."""

    source: GPTDataset
    numbers: Ints
    """(n,) sample of each, before shuffling."""
    positions: Ints
    """(n,) place of its sequence in the document index."""
    begins: Ints
    ends: Ints
    """(n,) tokens of the sequence."""

    @staticmethod
    def of(source: GPTDataset, numbers: Ints, positions: Ints) -> _Found:
        index, indexed = source.indices, _file(source)
        (first, offset), (last, bound) = (
            index.sample_index[numbers + side].astype(np.int64).T for side in (0, 1)
        )
        lengths = indexed.sequence_lengths[index.document_index[positions]].astype(np.int64)
        begins = np.where(positions == first, offset, 0)
        ends = np.where(positions == last, bound + int(source.sample_format.extra_token), lengths)
        some = begins < ends
        return _Found(source, numbers[some], positions[some], begins[some], ends[some])

    def piece(self, k: int, sample: int) -> DocumentPiece:
        index, indexed = self.source.indices, _file(self.source)
        lengths = indexed.sequence_lengths
        position = int(self.positions[k])
        sequence = int(index.document_index[position])
        bounds = indexed.document_indices
        document = int(np.searchsorted(bounds, sequence, side="right")) - 1
        before = int(lengths[bounds[document] : sequence].sum(dtype=np.int64))
        first, offset = index.sample_index[self.numbers[k]].tolist()
        between = index.document_index[first:position]
        at = int(lengths[between].sum(dtype=np.int64)) - offset if position > first else 0
        begin, end = int(self.begins[k]) + before, int(self.ends[k]) + before
        return DocumentPiece(sample, indexed.prefix, document, begin, end, at)


def _file(source: GPTDataset) -> DocumentFile:
    if not isinstance(source.indexed, DocumentFile):
        raise ConfigError(f"{source.indexed.prefix} is mock data, which comes from no document")
    return source.indexed


def _source(dataset: GPTDataset | BlendedDataset, sample: int) -> tuple[GPTDataset, int]:
    if isinstance(dataset, GPTDataset):
        return dataset, sample
    source = dataset.datasets[int(dataset.dataset_index[sample])]
    return source, int(dataset.dataset_sample_index[sample])


def _sources(
    dataset: GPTDataset | BlendedDataset,
) -> Iterator[tuple[GPTDataset, tuple[Ints, Ints] | None]]:
    """Each source, and (numbers in it, numbers in the blend) of the samples that it serves."""
    if isinstance(dataset, GPTDataset):
        yield dataset, None
        return
    for number, source in enumerate(dataset.datasets):
        blended = np.flatnonzero(dataset.dataset_index == number)
        yield source, (dataset.dataset_sample_index[blended], blended)


def _served_as(source: GPTDataset, served: tuple[Ints, Ints] | None) -> Ints:
    """(n,) the number in the whole dataset of each sample before shuffling; -1 if not served."""
    shuffled = np.empty(len(source), np.int64)
    shuffled[source.indices.shuffle_index] = np.arange(len(source))
    if served is None:
        return shuffled
    places = np.full(len(source), -1, np.int64)
    places[served[0]] = served[1]
    return places[shuffled]


def _positions(source: GPTDataset, documents: Ints) -> Ints:
    """The places of these documents' sequences in the document index."""
    indexed = _file(source)
    wanted = np.zeros(indexed.num_documents, np.bool_)
    wanted[documents] = True
    chosen = np.repeat(wanted, np.diff(indexed.document_indices))  # by sequence
    return np.flatnonzero(chosen[source.indices.document_index])


def _samples_with(source: GPTDataset, positions: Ints) -> tuple[Ints, Ints]:
    """(sample before shuffling, position) of every sample that reaches over each position."""
    bounds = source.indices.sample_index[:, 0]
    first = np.searchsorted(bounds[1:], positions, side="left")
    counts = np.searchsorted(bounds[:-1], positions, side="right") - first
    begins = np.cumsum(counts) - counts
    numbers = np.repeat(first - begins, counts) + np.arange(counts.sum())
    return numbers, np.repeat(positions, counts)
