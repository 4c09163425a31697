"""GPT samples: s tokens and the token after each of them, over the documents of a split.

The items are those of Megatron-LM. Numpy only; a dataset is read-only and indexes whole runs, so
where to go on after a restart is a number of samples and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.samples import SampleIndices, build_sample_indices
from trainyard.errors import DataError

NO_PAD = -1
"""An id that no token has."""

Sample = dict[str, NDArray[Any]]


class Dataset(Protocol):
    """What the loader and the ledger ask of a dataset."""

    def __len__(self) -> int:
        """Samples."""

    def __getitem__(self, index: int) -> Sample:
        """tokens, labels, position_ids int64 (s,) and loss_mask float32 (s,)."""

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2) source and sample number behind each index: what the ledger digests."""


@dataclass(frozen=True, slots=True)
class SampleFormat:
    """How tokens become a sample; the same for all sources of a run."""

    seq_length: int
    seed: int
    vocab_size: int
    """Ids at or above it are a fault in the data."""
    eod: int
    pad: int = NO_PAD
    reset_position_ids: bool = False
    eod_mask_loss: bool = False


class GPTDataset:
    """Samples of one token file, over the given sequences of it."""

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: NDArray[np.int32],
        num_samples: int | None,
        form: SampleFormat,
        drop_last_partial: bool = True,
    ) -> None:
        if indexed.dtype.kind == "f":
            raise DataError(
                f"{indexed.prefix}.idx: the tokens are stored as {indexed.dtype}; ids to train on "
                "are whole numbers, tokenize the text again"
            )
        self.indexed = indexed
        self.form = form
        self.indices: SampleIndices = build_sample_indices(
            indexed.sequence_lengths,
            documents,
            form.seq_length,
            form.seed,
            num_samples,
            drop_last_partial=drop_last_partial,
        )
        self._positions = np.arange(form.seq_length, dtype=np.int64)
        self._ones = np.ones(form.seq_length, dtype=np.float32)

    def __len__(self) -> int:
        return len(self.indices.shuffle_index)

    def __getitem__(self, index: int) -> Sample:
        return build_sample(self.text(index), self.form, self._positions, self._ones)

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2): 0, and the sample's number before shuffling."""
        samples = self.indices.shuffle_index[indices].astype(np.int64)
        return np.stack([np.zeros_like(samples), samples], axis=1)

    def text(self, index: int) -> NDArray[np.int64]:
        """(s + 1,) tokens, filled with the pad id behind the end of the documents."""
        sample = self.indices.shuffle_index[index]
        (first, offset), (last, end) = self.indices.sample_index[sample : sample + 2].tolist()
        text = np.empty(self.form.seq_length + 1, np.int64)
        filled = 0
        for position in range(first, last + 1):
            document = int(self.indices.document_index[position])
            stop = end + 1 if position == last else int(self.indexed.sequence_lengths[document])
            piece = self.indexed.get(document, offset, stop - offset)
            if len(piece) != stop - offset:
                self._refuse_piece(document, stop - offset, len(piece))
            text[filled : filled + len(piece)] = piece
            filled, offset = filled + len(piece), 0
        if (
            text[:filled].view(np.uint64).max() >= self.form.vocab_size
        ):  # a negative id is a huge one
            self._refuse_token(text[:filled], first, last)
        text[filled:] = self.form.pad
        return text

    def _refuse_piece(self, document: int, asked: int, found: int) -> None:
        raise DataError(
            f"{self.indexed.prefix}.bin: sequence {document} gave {found} of {asked} tokens; the "
            "file was changed or cut short, make the pair again"
        )

    def _refuse_token(self, text: NDArray[np.int64], first: int, last: int) -> None:
        documents = self.indices.document_index[first : last + 1].tolist()
        wrong = text.view(np.uint64) >= self.form.vocab_size
        raise DataError(
            f"{self.indexed.prefix}: token {text[wrong][0]} in one of the sequences "
            f"{documents[:8]} is outside the vocabulary of {self.form.vocab_size}; were these "
            "files made with another tokenizer?"
        )


class BlendedDataset:
    """Samples of several datasets in given shares."""

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> None:
        self.datasets = datasets
        self.dataset_index = dataset_index
        self.dataset_sample_index = dataset_sample_index

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> Sample:
        source = self.datasets[int(self.dataset_index[index])]
        return source[int(self.dataset_sample_index[index])]

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2): the source's number, and the sample's number in it."""
        ids = np.empty((len(indices), 2), np.int64)
        for place, index in enumerate(indices.tolist()):
            source = int(self.dataset_index[index])
            within = self.dataset_sample_index[index : index + 1]
            ids[place] = source, self.datasets[source].ids(within)[0, 1]
        return ids


def build_sample(
    text: NDArray[np.int64],
    form: SampleFormat,
    positions: NDArray[np.int64],
    ones: NDArray[np.float32],
) -> Sample:
    """text: (s + 1,). Tokens are text[:-1], labels text[1:]; padding and, if asked, the token after
    an end of document do not count in the loss."""
    tokens, labels, loss_mask = text[:-1], text[1:], ones
    if form.eod_mask_loss:
        loss_mask = (tokens != form.eod).astype(np.float32)
    if form.pad != NO_PAD or text[-1] == NO_PAD:
        loss_mask = loss_mask * (labels != form.pad)
        tokens, labels = (
            np.where(tokens == form.pad, 0, tokens),
            np.where(labels == form.pad, 0, labels),
        )
    if form.reset_position_ids:
        positions = positions_in_documents(tokens, form.eod)
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask.astype(np.float32, copy=False),
        "position_ids": positions,
    }


def positions_in_documents(tokens: NDArray[np.int64], eod: int) -> NDArray[np.int64]:
    """(s,) place of each token in its document; an end of document belongs to what it ends."""
    places = np.arange(len(tokens), dtype=np.int64)
    starts = np.zeros_like(places)
    starts[1:] = np.where(tokens[:-1] == eod, places[1:], 0)
    return places - np.maximum.accumulate(starts)
