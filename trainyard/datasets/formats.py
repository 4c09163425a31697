"""The datasets of a token file, by the format of their samples: pieces of documents for GPT, runs
of sentences for BERT and T5. No torch."""

from __future__ import annotations

from typing import Any, TypeAlias

from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.blended import Blended
from trainyard.datasets.config import DataConfig
from trainyard.datasets.gpt import BlendedDataset, GPTDataset
from trainyard.datasets.index_cache import Indexer
from trainyard.datasets.masked.bert import BERTDataset, BertFormat
from trainyard.datasets.masked.sentences import SentenceDataset
from trainyard.datasets.masked.t5 import T5Dataset, T5Format
from trainyard.datasets.sample_format import SampleFormat
from trainyard.datasets.splits import (
    TooLittleDataError,
    documents_of_split,
    drops_last,
    sentence_documents_of_split,
)
from trainyard.datasets.token_rows import TokenSource
from trainyard.errors import DataError

OF_SENTENCES: dict[type, type[SentenceDataset[Any]]] = {
    BertFormat: BERTDataset,
    T5Format: T5Dataset,
}

Format: TypeAlias = SampleFormat | BertFormat | T5Format
OneSource: TypeAlias = GPTDataset | SentenceDataset[Any]
Built: TypeAlias = OneSource | Blended[Any]


def open_dataset(
    file: TokenSource,
    data: DataConfig,
    sample_format: Format,
    split: str,
    size: int | None,
    indexer: Indexer,
) -> OneSource:
    """The samples of a split, at least `size`; None: one epoch."""
    if isinstance(sample_format, SampleFormat):
        documents = documents_of_split(file, data, sample_format, split)
        drop_last = drops_last(data, split)
        return GPTDataset(file, documents, size, sample_format, drop_last, indexer)
    assert isinstance(file, IndexedDataset), "made-up data has no sentences"
    chosen = sentence_documents_of_split(file, data, split)
    try:
        return OF_SENTENCES[type(sample_format)](file, chosen, size, sample_format, indexer)
    except DataError as error:
        if split == "test":  # a run needs no test data
            raise TooLittleDataError(str(error)) from error
        raise


def blend(datasets: list[Any], *indices: Any) -> Blended[Any]:
    """Datasets in shares; GPT samples are read several at once."""
    kind = BlendedDataset if isinstance(datasets[0], GPTDataset) else Blended
    return kind(datasets, *indices)
