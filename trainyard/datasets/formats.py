"""The datasets of a file, by the format of their samples: pieces of documents for GPT, some of them
with their middle last, runs of sentences for BERT and T5, conversations. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from trainyard.artifacts.inputs import Manifests
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.blended import Blended
from trainyard.datasets.config import DataConfig
from trainyard.datasets.fim import FIMDataset
from trainyard.datasets.fim_config import FimConfig
from trainyard.datasets.fine_tuning.conversations import ConversationFile
from trainyard.datasets.fine_tuning.sft import SFTDataset, SftFormat
from trainyard.datasets.fine_tuning.tokenize import InstructionTokenizer
from trainyard.datasets.gpt import BlendedDataset, GPTDataset
from trainyard.datasets.index_cache import Indexer
from trainyard.datasets.masked.bert import BERTDataset, BertFormat
from trainyard.datasets.masked.sentences import SentenceDataset
from trainyard.datasets.masked.t5 import T5Dataset, T5Format
from trainyard.datasets.plain_text import Detokenizer
from trainyard.datasets.sample_format import SampleFormat
from trainyard.datasets.splits import (
    TooLittleDataError,
    documents_of_split,
    drops_last,
    lines_of_split,
    open_tokens,
    sentence_documents_of_split,
)
from trainyard.datasets.token_rows import TokenSource
from trainyard.datasets.vocabulary import check_tokens
from trainyard.errors import DataError

OF_SENTENCES: dict[type, type[SentenceDataset[Any]]] = {
    BertFormat: BERTDataset,
    T5Format: T5Dataset,
}


@dataclass(frozen=True, slots=True)
class FimFormat:
    """Samples of documents, some texts of which are rearranged."""

    samples: SampleFormat
    config: FimConfig
    tokenizer: Detokenizer

    @property
    def vocab_size(self) -> int:
        """Ids at or above it are an error in the data."""
        return self.samples.vocab_size


@dataclass(frozen=True, slots=True)
class InstructionFormat:
    """Samples of conversations and questions."""

    samples: SftFormat
    tokenizer: InstructionTokenizer


Format: TypeAlias = SampleFormat | FimFormat | InstructionFormat | BertFormat | T5Format
Source: TypeAlias = TokenSource | ConversationFile
OneSource: TypeAlias = GPTDataset | FIMDataset | SFTDataset | SentenceDataset[Any]
Built: TypeAlias = OneSource | Blended[Any]


def open_source(
    prefix: str,
    data: DataConfig,
    sample_format: Format,
    num_sources: int,
    indexer: Indexer,
    manifests: Manifests | None = None,
) -> Source:
    """The file of a prefix, token ids checked. num_sources: files of the run. manifests: as for
    `IndexedDataset`."""
    if isinstance(sample_format, InstructionFormat):
        return ConversationFile(prefix)
    file = open_tokens(prefix, data, manifests)
    check_tokens(file, sample_format.vocab_size, num_sources, indexer)
    return file


def open_dataset(
    file: Source,
    data: DataConfig,
    sample_format: Format,
    split: str,
    size: int | None,
    indexer: Indexer,
) -> OneSource:
    """The samples of a split, at least `size`; None: one epoch."""
    if isinstance(sample_format, InstructionFormat):
        assert isinstance(file, ConversationFile)
        lines = lines_of_split(file, data, split)
        return SFTDataset(file, lines, size, sample_format.samples, sample_format.tokenizer)
    assert not isinstance(file, ConversationFile)
    if isinstance(sample_format, FimFormat):
        texts = _documents(file, data, sample_format.samples, split, size, indexer)
        return FIMDataset(texts, sample_format.config, sample_format.tokenizer)
    if isinstance(sample_format, SampleFormat):
        return _documents(file, data, sample_format, split, size, indexer)
    assert isinstance(file, IndexedDataset), "made-up data has no sentences"
    chosen = sentence_documents_of_split(file, data, split)
    try:
        return OF_SENTENCES[type(sample_format)](file, chosen, size, sample_format, indexer)
    except DataError as error:
        if split == "test":  # a run needs no test data
            raise TooLittleDataError(str(error)) from error
        raise


def _documents(
    file: TokenSource,
    data: DataConfig,
    samples: SampleFormat,
    split: str,
    size: int | None,
    indexer: Indexer,
) -> GPTDataset:
    documents = documents_of_split(file, data, samples, split)
    return GPTDataset(file, documents, size, samples, drops_last(data, split), indexer)


def blend(datasets: list[Any], *indices: Any) -> Blended[Any]:
    """Datasets in shares; GPT samples are read several at once."""
    kind = BlendedDataset if isinstance(datasets[0], GPTDataset) else Blended
    return kind(datasets, *indices)
