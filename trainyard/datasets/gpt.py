"""GPT samples: s tokens and the token after each of them, over the documents of a split.

A dataset is read-only and indexes whole runs, so a restart needs only a number of samples. Tokens
are gathered piece by piece in the type of the file, several samples in one array; everything else
is computed for the whole batch at once (`sample_format`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.blended import Blended
from trainyard.datasets.index_cache import IN_MEMORY, Indexer, Remember, compute_again
from trainyard.datasets.sample_format import (
    NO_PAD,
    Dataset,
    Sample,
    SampleFormat,
    build_sample,
    build_samples,
    first,
    ids_in_one_source,
    positions_in_documents,
)
from trainyard.datasets.samples import Documents, SampleIndices
from trainyard.datasets.token_rows import (
    Read,
    TokenSource,
    checked_text,
    is_mapped,
    reader,
    segments_of_pieces,
)
from trainyard.datasets.vocabulary import fault, refuse_floats
from trainyard.errors import DataError

__all__ = [
    "NO_PAD",
    "BlendedDataset",
    "Dataset",
    "GPTDataset",
    "Sample",
    "SampleFormat",
    "TokenSource",
    "build_sample",
    "build_samples",
    "positions_in_documents",
]


class GPTDataset:
    """Samples of one token file, over the given sequences."""

    def __init__(
        self,
        indexed: TokenSource,
        documents: Documents,
        num_samples: int | None,
        sample_format: SampleFormat,
        drop_last_partial: bool = True,
        indexer: Indexer = IN_MEMORY,
    ) -> None:
        refuse_floats(indexed)
        self.indexed = indexed
        self.sample_format = sample_format
        self.indices: SampleIndices = indexer.samples(
            indexed.sequence_lengths,
            documents,
            sample_format.seq_length,
            sample_format.seed,
            num_samples,
            extra_token=sample_format.extra_token,
            drop_last_partial=drop_last_partial,
            remember=_memory_of(indexed),
        )

    def __len__(self) -> int:
        return len(self.indices.shuffle_index)

    def __getitem__(self, index: int) -> Sample:
        return first(self.__getitems__([index]))

    def __getitems__(self, indices: Sequence[int]) -> Sample:
        """Several samples, stacked."""
        rows = np.empty((len(indices), self.sample_format.text_length), self.indexed.dtype)
        bounds = self.fill(indices, rows)
        text = checked_text(
            rows, bounds, self.sample_format, lambda row, t: self.refuse_token(indices[row], t)
        )
        return build_samples(
            text, self.sample_format, segments_of_pieces(bounds, self.sample_format)
        )

    def prefetch(self, indices: Sequence[int]) -> None:
        """Say which samples will be asked for soon."""
        if isinstance(self.indexed, IndexedDataset) and not is_mapped(self.indexed):
            self.indexed.prefetch([piece for index in indices for piece in self._pieces(index)])

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2): 0, and the sample's number before shuffling."""
        return ids_in_one_source(self.numbers(indices))

    def numbers(self, indices: NDArray[np.int64] | slice) -> NDArray[np.integer[Any]]:
        """(n,) the numbers of samples before shuffling."""
        return self.indices.shuffle_index[indices]

    def text(self, index: int) -> NDArray[np.int64]:
        """(s + 1,) tokens, filled with the pad id behind the end of the documents."""
        rows = np.empty((1, self.sample_format.text_length), np.int64)
        bounds = self.fill([index], rows)
        text: NDArray[np.int64] = checked_text(
            rows, bounds, self.sample_format, lambda _, token: self.refuse_token(index, token)
        )[0]
        return text

    def fill(self, indices: Sequence[int], rows: NDArray[Any]) -> list[list[int]]:
        """Write the tokens of samples to the beginnings of `rows`.

        Returns for each where its pieces begin, and where the last one ends. A piece is the part of
        one document, and may be empty."""
        read = reader(self.indexed)
        return [self._fill_row(index, row, read) for index, row in zip(indices, rows, strict=True)]

    def _fill_row(self, index: int, row: NDArray[Any], read: Read) -> list[int]:
        filled, bounds = 0, [0]
        for document, offset, length in self._pieces(index):
            piece = read(document, offset, length)
            if len(piece) != length:
                self._refuse_piece(document, length, len(piece))
            row[filled : filled + length] = piece
            filled += length
            bounds.append(filled)
        return bounds

    def _pieces(self, index: int) -> list[tuple[int, int, int]]:
        """The pieces of a sample, in order: (sequence, offset, length)."""
        begins, documents = self.indices.sample_index, self.indices.document_index
        sample = self.indices.shuffle_index.item(index)
        position, offset = begins.item(sample, 0), begins.item(sample, 1)
        last, end = begins.item(sample + 1, 0), begins.item(sample + 1, 1)
        end += self.sample_format.extra_token
        if position == last:
            return [(documents.item(position), offset, end - offset)]
        length_of, pieces = self.indexed.sequence_lengths.item, []
        while position < last:
            document = documents.item(position)
            pieces.append((document, offset, length_of(document) - offset))
            position, offset = position + 1, 0
        pieces.append((documents.item(last), 0, end))
        return pieces

    def refuse_token(self, index: int, token: int) -> None:
        """Raise the error of a token outside the vocabulary, with its origin."""
        sample = int(self.indices.shuffle_index[index])
        for document, offset, length in self._pieces(index):
            places = np.flatnonzero(self.indexed.get(document, offset, length) == token)
            if len(places):
                of = f" (sample {sample})"
                place = offset + int(places[0])
                raise fault(self.indexed, document, place, token, self.sample_format.vocab_size, of)
        raise AssertionError((sample, token))

    def _refuse_piece(self, document: int, asked: int, found: int) -> None:
        raise DataError(
            f"{self.indexed.prefix}.bin: sequence {document} has only {found} of {asked} tokens; "
            "the file was changed or truncated, make the pair again"
        )


def _memory_of(indexed: TokenSource) -> Remember:
    """Remembers what was computed from a version of the index of a file."""
    return indexed.remember if isinstance(indexed, IndexedDataset) else compute_again


class BlendedDataset(Blended[GPTDataset]):
    """Samples of several datasets in given shares, read several at once."""

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> None:
        super().__init__(datasets, dataset_index, dataset_sample_index)
        self._dtype = np.result_type(*{dataset.indexed.dtype for dataset in datasets})
        self._all_mapped = all(is_mapped(dataset.indexed) for dataset in datasets)

    def __getitem__(self, index: int) -> Sample:
        return first(self.__getitems__([index]))

    @property
    def sample_format(self) -> SampleFormat:
        """How tokens become a sample, the same for all."""
        return self.datasets[0].sample_format

    def text(self, index: int) -> NDArray[np.int64]:
        """(s + 1,) tokens, filled with the pad id behind the end of the documents."""
        source, within = self.place(index)
        return source.text(within)

    def __getitems__(self, indices: Sequence[int]) -> Sample:
        """Several samples, stacked."""
        places = [self.place(index) for index in indices]
        sample_format = self.sample_format
        rows = np.empty((len(indices), sample_format.text_length), self._dtype)
        bounds = []
        for row, (source, within) in enumerate(places):
            bounds += source.fill([within], rows[row : row + 1])

        def refuse(row: int, token: int) -> None:
            source, within = places[row]
            source.refuse_token(within, token)

        return build_samples(
            checked_text(rows, bounds, sample_format, refuse),
            sample_format,
            segments_of_pieces(bounds, sample_format),
        )

    def prefetch(self, indices: Sequence[int]) -> None:
        """Say which samples will be asked for soon."""
        if not self._all_mapped:
            super().prefetch(indices)
