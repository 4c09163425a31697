"""What BERT and T5 data have in common: samples that are runs of sentences of one document.

The sentences are the sequences of a token file made with --split-sentences. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.arrays import Arrays, digest_array
from trainyard.datasets.index_cache import IN_MEMORY, Indexer
from trainyard.datasets.masked.mapping import MappingRule, build_mapping
from trainyard.datasets.sample_format import Sample, ids_in_one_source, spelled_out
from trainyard.datasets.token_rows import is_mapped
from trainyard.errors import ConfigError, DataError

NOT_ASKED = -1
"""The label of a token that the model need not predict."""


class SentenceSamples:
    """Samples over some documents of a token file, in the order of training."""

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        num_samples: int | None,
        rule: MappingRule,
        vocab_size: int,
        indexer: Indexer = IN_MEMORY,
    ) -> None:
        self.indexed = indexed
        self._vocab_size = vocab_size
        bounds = indexed.document_indices[documents.start : documents.stop + 1]
        lengths = indexed.sequence_lengths
        facts = {
            "function": "sentence_mapping",
            "sentence_lengths": digest_array(lengths, "<i4"),
            "document_bounds": digest_array(bounds, "<i8"),
            "num_samples": num_samples,
            **asdict(rule),
        }

        def build() -> Arrays:
            return {"rows": build_mapping(lengths, bounds, rule, num_samples)}

        try:
            self.rows = indexer.arrays(facts, build)["rows"]
        except DataError as fault:
            raise DataError(f"{indexed.prefix}: {fault}") from None

    def __len__(self) -> int:
        return len(self.rows)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Say which samples will be asked for soon."""
        if not is_mapped(self.indexed):
            self.indexed.prefetch([(i, 0, None) for k in indices for i in self.sentences(k)])

    def sentences(self, index: int) -> range:
        """The sequences of the token file that a sample is made of."""
        first, end, _ = self.rows[index].tolist()
        return range(first, end)

    def target_length(self, index: int) -> int:
        """Length in tokens to which a sample is cut."""
        return int(self.rows[index, 2])

    def tokens(self, sentences: range) -> NDArray[np.int64]:
        """The tokens of consecutive sentences, concatenated."""
        if not sentences:
            return np.empty(0, np.int64)
        text = np.concatenate([self.indexed.get(i) for i in sentences]).astype(np.int64)
        wrong = text.view(np.uint64) >= self._vocab_size  # a negative id is a huge one
        if wrong.any():
            raise DataError(
                f"{self.indexed.prefix}: token {text[wrong][0]} in one of the sequences "
                f"{sentences.start} to {sentences.stop - 1} is outside the vocabulary of "
                f"{self._vocab_size}; were these files made with another tokenizer?"
            )
        return text


class SentenceFormat(Protocol):
    """The part of a sample format that gathering sentences needs."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def mapping(self) -> MappingRule:
        """The rule that gathers sentences into samples."""


Format = TypeVar("Format", bound=SentenceFormat)


class SentenceDataset(Generic[Format]):
    """The samples of one token file of sentences, over a range of its documents. Subclasses define
    `__getitem__`."""

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        num_samples: int | None,
        sample_format: Format,
        indexer: Indexer = IN_MEMORY,
    ) -> None:
        self.sample_format = sample_format
        self.samples = SentenceSamples(
            indexed,
            documents,
            num_samples,
            sample_format.mapping,
            sample_format.vocab_size,
            indexer,
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        """See the subclass."""
        raise NotImplementedError

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2): 0, and the number of the sample."""
        return ids_in_one_source(self.numbers(indices))

    def numbers(self, indices: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        """(n,) the number of the sample."""
        return spelled_out(indices)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Say which samples will be asked for soon."""
        self.samples.prefetch(indices)


def special_id(tokenizer: object, name: str, purpose: str) -> int:
    """The id of a tokenizer's `name`, such as "cls"; ConfigError if it has none."""
    found = getattr(tokenizer, name, None)
    if not isinstance(found, int | np.integer):
        config = getattr(tokenizer, "config", None)
        kind = getattr(config, "tokenizer_type", type(tokenizer).__name__)
        raise ConfigError(f"--tokenizer-type {kind} has no {name} token, which {purpose} needs")
    return int(found)


def word_beginnings(tokenizer: object, vocab_size: int) -> NDArray[np.bool_] | None:
    """(vocabulary,) whether a token begins a word; None if the tokenizer does not know."""
    begins: NDArray[np.bool_] | None = getattr(tokenizer, "begins_word", None)
    assert begins is None or (begins.dtype == np.bool_ and len(begins) >= vocab_size)
    return begins


def padded(values: NDArray[np.int64], length: int, filler: int) -> NDArray[np.int64]:
    """(length,) the values, then fillers."""
    row = np.full(length, filler, np.int64)
    row[: len(values)] = values
    return row


def mask_of(filled: int, length: int) -> NDArray[np.int64]:
    """(length,) 1 for the first `filled` places, then 0."""
    return (np.arange(length) < filled).astype(np.int64)
