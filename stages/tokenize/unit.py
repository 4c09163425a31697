"""One unit of work: the documents of a byte range to a pair of token files for every JSON key.

A pure function of the range and the options, run in this process or in a worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trainyard.artifacts import store
from trainyard.corpus.documents import ByteRange, Document, locate, read_documents
from trainyard.corpus.indexed import IndexedWriter, optimal_dtype
from trainyard.errors import DataError
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

BATCH_LETTERS = 1 << 20
"""Text handed to the tokenizer at once; one document may be longer."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What a worker is told."""

    name: str
    source: ByteRange
    targets: tuple[str, ...]
    """URL without .bin or .idx, for each JSON key."""
    json_keys: tuple[str, ...]
    append_eod: bool
    tokenizer: TokenizerConfig


@lru_cache(maxsize=1)
def cached_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer, built once a process."""
    return build_tokenizer(config)


def tokenize_unit(unit: Unit) -> dict[str, Any]:
    """Write the unit's pairs; returns its number of documents and tokens."""
    tokenizer = cached_tokenizer(unit.tokenizer)
    dtype = optimal_dtype(tokenizer.vocab_size)
    num_documents = 0
    tokens = [0] * len(unit.targets)
    with ExitStack() as stack:
        outputs = [stack.enter_context(store.open_output(t + ".bin")) for t in unit.targets]
        writers = [IndexedWriter(output, dtype) for output in outputs]
        for batch in batches(read_documents(unit.source, unit.json_keys)):
            num_documents += len(batch)
            for k, writer in enumerate(writers):
                for ids in encode(tokenizer, batch, k, unit.source.url):
                    sequences = as_sequences(ids, tokenizer.eod if unit.append_eod else None)
                    writer.add_document(sequences)
                    tokens[k] += sum(map(len, sequences))
        indices = [stack.enter_context(store.open_output(t + ".idx")) for t in unit.targets]
        for writer, index in zip(writers, indices, strict=True):
            writer.write_index(index)
    return {"documents": num_documents, "tokens": tokens}


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in lots of about `BATCH_LETTERS`."""
    batch: list[Document] = []
    letters = 0
    for document in documents:
        batch.append(document)
        letters += 1 + sum(len(text) for texts in document.values for text in texts)
        if letters >= BATCH_LETTERS:
            yield batch
            batch, letters = [], 0
    if batch:
        yield batch


def encode(
    tokenizer: Tokenizer, batch: Sequence[Document], k: int, url: str
) -> Iterator[list[list[int]]]:
    """For each document the ids of its sentences under key number `k`."""
    try:
        encoded = iter(tokenizer.encode_batch([t for doc in batch for t in doc.values[k]]))
    except Exception:
        _blame(tokenizer, batch, k, url)
        raise
    for document in batch:
        yield [next(encoded) for _ in document.values[k]]


def as_sequences(sentences: Sequence[list[int]], eod: int | None) -> list[list[int]]:
    """Megatron's rule: empty sentences fall away; the end of a document belongs to its last one."""
    sequences = [ids for ids in sentences if ids]
    if sequences and eod is not None:
        sequences[-1] = [*sequences[-1], eod]
    return sequences


def _blame(tokenizer: Tokenizer, batch: Sequence[Document], k: int, url: str) -> None:
    """Raise DataError for the first document of the batch that cannot be encoded by itself."""
    for document in batch:
        try:
            tokenizer.encode_batch(document.values[k])
        except Exception as error:
            place = locate(url, document.offset)
            raise DataError(f"{place}: cannot be tokenized: {error}") from error
