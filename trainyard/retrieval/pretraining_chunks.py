"""Chunks of the samples of a training: what neighbours are searched for.

Sample i has the chunks i * l up to (i + 1) * l, in the order in which the training serves samples:
shuffled and blended, over all its epochs. Made from the datasets that the training itself reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts.digest import hasher
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.build import build_datasets
from trainyard.datasets.config import SPLIT_NAMES, DataConfig
from trainyard.datasets.gpt import BlendedDataset, GPTDataset
from trainyard.datasets.index_cache import IN_MEMORY, IndexCache
from trainyard.datasets.sample_format import SampleFormat
from trainyard.errors import ConfigError
from trainyard.retrieval.token_files import pair_digest

Ints = NDArray[np.int64]

NO_TOKEN = -1
"""Behind the last token of the last sample of validation data that is not cut to whole samples."""

SAMPLES = "samples.json"
"""Beside the embeddings of chunks: the identity of their samples."""

ANY = 0
"""For the end of document and the vocabulary, which do not decide what a sample contains."""

SAMPLES_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesIdentity:
    """What decides the chunks of the samples of a split; JSON-able by `asdict`."""

    split: str
    seq_length: int
    chunk_length: int
    num_samples: int
    data: tuple[str, ...]
    """Digests of the token files, in the order of the blend; copies have the same."""
    order: str
    """Digest of the places at which all samples begin."""

    def difference(self, other: SamplesIdentity) -> str:
        """Message: how another differs from this one; empty if they are equal."""
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if mine == theirs:
                continue
            if name == "order":
                return "another order: the seed, the blend, the split or the length of the run"
            if name == "data":
                return f"other token files: {_short(mine)}, not {_short(theirs)}"
            return f"{name} {mine}, not {theirs}"
        return ""

    @staticmethod
    def from_document(document: Any) -> SamplesIdentity:
        """The inverse of `as_document`. Raises TypeError or KeyError for another document."""
        return SamplesIdentity(**{**document, "data": tuple(document["data"])})


class PretrainingChunks:
    """The chunks of the samples that a training takes from one split."""

    def __init__(
        self, dataset: GPTDataset | BlendedDataset, split: str, chunk_length: int, num_samples: int
    ) -> None:
        """num_samples: the first samples of the dataset are those that the training takes.

        Raises ConfigError for mock data, and for a sample that is not a number of chunks."""
        self.split, self.chunk_length, self.num_samples = split, chunk_length, num_samples
        self.seq_length = dataset.sample_format.seq_length
        check_lengths(self.seq_length, chunk_length)
        self.chunks_per_sample = self.seq_length // chunk_length
        self._dataset = dataset
        self._sources = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
        files = [_file(source) for source in self._sources]
        self.prefixes = tuple(dict.fromkeys(file.prefix for file in files))
        """The token files, in the order of the blend; `documents` numbers datasets by it."""
        self._numbers = [self.prefixes.index(file.prefix) for file in files]

    @staticmethod
    def open(
        data: DataConfig,
        split: str,
        *,
        seq_length: int,
        seed: int,
        sizes: tuple[int, int, int],
        num_consumed: int = 0,
        chunk_length: int = 64,
        vocab_size: int = ANY,
    ) -> PretrainingChunks:
        """The chunks of a training by its options.

        sizes, num_consumed: as for `datasets.build.build_datasets`; `training.run_samples` has them
        for the options of a run. vocab_size: larger tokens are refused; 0: not checked."""
        check_data(data)
        check_lengths(seq_length, chunk_length)
        form = SampleFormat(seq_length, seed, vocab_size=vocab_size, eod=ANY)
        wanted = SPLIT_NAMES.index(split)
        if not sizes[wanted]:
            raise ConfigError(
                f"--eval-iters 0: the run takes no {split} samples, so they have no neighbours; "
                "give what the training has, or take the train split alone"
            )
        only = tuple(size if place == wanted else 0 for place, size in enumerate(sizes))
        cache = data.data_cache_path
        indexer = IN_MEMORY if cache is None else IndexCache(cache)
        built = build_datasets(data, form, (only[0], only[1], only[2]), indexer, num_consumed)
        sets = {"train": built.train, **dict(built.valid), **dict(built.test)}
        dataset = sets.get(split)
        if dataset is None:
            raise ConfigError(
                f"the options leave no {split} data ({built.untested or f'--split {data.split}'}); "
                "without it there are no neighbours to search for"
            )
        assert isinstance(dataset, GPTDataset | BlendedDataset)
        size = max(sizes[wanted], num_consumed if split == "train" else 0)
        return PretrainingChunks(
            dataset, split, chunk_length, num_served(data, split, size, len(dataset))
        )

    def __len__(self) -> int:
        """The number of chunks."""
        return self.num_samples * self.chunks_per_sample

    def token_rows(self, start: int, stop: int) -> Ints:
        """(stop - start, chunk length) GPT tokens of these chunks; `NO_TOKEN` for padding."""
        self._check(start, stop, len(self))
        first, last = start // self.chunks_per_sample, -(-stop // self.chunks_per_sample)
        text_length = self._dataset.sample_format.text_length
        rows = np.full((last - first, text_length), NO_TOKEN, np.int64)
        samples = list(range(first, last))
        self._dataset.prefetch(samples)
        if isinstance(self._dataset, GPTDataset):
            self._dataset.fill(samples, rows)
        else:
            for row, (source, within) in enumerate(map(self._dataset.place, samples)):
                source.fill([within], rows[row : row + 1])
        chunks = rows[:, : self.seq_length].reshape(-1, self.chunk_length)
        before = first * self.chunks_per_sample
        return chunks[start - before : stop - before]

    def documents(self, start: int, stop: int) -> Ints:
        """(n, 3) sorted rows (sample, dataset, document): the documents that the samples `start`
        up to `stop` have a token of, their last label included.

        Datasets are numbered as in `prefixes`, documents as in the token file."""
        self._check(start, stop, self.num_samples)
        found = [np.empty((0, 3), np.int64)]
        for source, places, within in self._by_source(start, stop):
            index, file = self._sources[source].indices, _file(self._sources[source])
            numbers = index.shuffle_index[within].astype(np.int64)
            first = index.sample_index[numbers, 0].astype(np.int64)
            counts = index.sample_index[numbers + 1, 0] - first + 1
            samples = np.repeat(places, counts)
            positions = np.repeat(first - np.cumsum(counts) + counts, counts)
            positions += np.arange(len(positions))
            sequences = index.document_index[positions]
            some = file.sequence_lengths[sequences] > 0
            documents = np.searchsorted(file.document_indices, sequences[some], "right") - 1
            dataset = np.full(len(documents), self._numbers[source])
            found.append(np.stack((samples[some], dataset, documents), axis=1))
        rows: Ints = np.unique(np.concatenate(found), axis=0)
        return rows

    def identity(self) -> SamplesIdentity:
        """What a table of neighbours is bound to.

        Reads the index of every sample, and the token files that no manifest lists."""
        order = hasher()
        for start in range(0, self.num_samples, SAMPLES_AT_ONCE):
            order.update(self._begins(start, min(start + SAMPLES_AT_ONCE, self.num_samples)))
        return SamplesIdentity(
            split=self.split,
            seq_length=self.seq_length,
            chunk_length=self.chunk_length,
            num_samples=self.num_samples,
            data=tuple(pair_digest(prefix) for prefix in self.prefixes),
            order=order.hexdigest(),
        )

    def _begins(self, start: int, stop: int) -> bytes:
        """(n, 3) little-endian int64: dataset, sequence and token at which each sample begins."""
        out = np.empty((stop - start, 3), "<i8")
        for source, places, within in self._by_source(start, stop):
            index = self._sources[source].indices
            begins = index.sample_index[index.shuffle_index[within].astype(np.int64)]
            rows = places - start
            out[rows, 0] = self._numbers[source]
            out[rows, 1] = index.document_index[begins[:, 0]]
            out[rows, 2] = begins[:, 1]
        return out.tobytes()

    def _by_source(self, start: int, stop: int) -> Iterator[tuple[int, Ints, Ints]]:
        """Of each source the samples in that range, by number here and by number there."""
        samples = np.arange(start, stop, dtype=np.int64)
        if isinstance(self._dataset, GPTDataset):
            yield 0, samples, samples
            return
        sources = self._dataset.dataset_index[start:stop]
        within = self._dataset.dataset_sample_index[start:stop]
        for source in np.unique(sources).tolist():
            mine = sources == source
            yield source, samples[mine], within[mine]

    def _check(self, start: int, stop: int, count: int) -> None:
        if not 0 <= start <= stop <= count:
            raise IndexError(f"{start} up to {stop}: there are {count}, from 0")


def check_data(data: DataConfig) -> None:
    """Raise ConfigError for data whose samples cannot have neighbours."""
    if data.mock_data:
        raise ConfigError("--mock-data has no documents; give --data-path")
    if data.multiple_validation_sets:
        raise ConfigError(
            "--multiple-validation-sets: a table of neighbours is of one set; leave it out"
        )


def check_lengths(seq_length: int, chunk_length: int) -> None:
    """Raise ConfigError for a sample that is not a whole number of chunks."""
    if seq_length % chunk_length:
        raise ConfigError(
            f"--seq-length ({seq_length}) must be divisible by --retro-gpt-chunk-length "
            f"({chunk_length}): the chunks of a sample all have that length"
        )


def num_served(data: DataConfig, split: str, wanted: int, available: int) -> int:
    """How many samples of a dataset a training takes: the first ones, or all where their order is
    shuffled again (--dataloader-type cyclic) or all are measured (--full-validation)."""
    takes_all = data.dataloader_type != "single" or (split == "valid" and data.full_validation)
    return available if takes_all else min(wanted, available)


def as_document(identity: SamplesIdentity) -> dict[str, Any]:
    """The identity for a JSON document."""
    return {**asdict(identity), "data": list(identity.data)}


def _short(digests: tuple[str, ...]) -> str:
    return " ".join(digest[:12] for digest in digests)


def _file(source: GPTDataset) -> IndexedDataset:
    assert isinstance(source.indexed, IndexedDataset), "made-up data is refused before"
    return source.indexed
