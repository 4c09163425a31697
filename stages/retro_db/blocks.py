"""Cuts ranges of documents into chunks: the jobs of workers, and the blocks that they make up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from stages.retro_db.config import RetroDbConfig
from trainyard.artifacts import store
from trainyard.artifacts.urls import is_local
from trainyard.corpus.indexed import IndexedDataset
from trainyard.corpus.virtual import files_of
from trainyard.datasets.vocabulary import fault, outside
from trainyard.retrieval.chunks import Rows, chunk_rows
from trainyard.retrieval.hdf5 import block_name
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer
from trainyard.tokenizers.wordpiece import WordPieceTokenizer, build_wordpiece

JOB_TOKENS = 1 << 18
"""Tokens after which a job ends with its document: some thousand chunks, half a second."""


@dataclass(frozen=True, slots=True)
class DocumentBlock:
    """Neighbouring documents of one dataset, and the file of their chunks."""

    dataset: int
    first: int
    last: int
    name: str
    """Of its file in the output."""

    @property
    def key(self) -> str:
        """Its name in the work folder."""
        return f"{self.dataset:03d}-{self.first:012d}"


@dataclass(frozen=True, slots=True)
class CutJob:
    """Some documents of a block, from `first` up to `last`."""

    block: DocumentBlock
    first: int
    last: int
    num_tokens: int
    prefix: str
    version: str
    """Of the .bin, so that a changed file is opened again."""
    gpt: TokenizerConfig
    bert: TokenizerConfig
    chunk_length: int


def plan_blocks(
    dataset: int, name: str, num_documents: int, block_size: int
) -> list[DocumentBlock]:
    """The blocks of a dataset."""
    blocks = []
    for first in range(0, num_documents, block_size):
        last = min(num_documents, first + block_size)
        blocks.append(
            DocumentBlock(dataset, first, last, block_name(name, first, last, num_documents))
        )
    return blocks


def cut_jobs(
    config: RetroDbConfig, tokens: IndexedDataset, block: DocumentBlock, prefix: str, version: str
) -> list[CutJob]:
    """The work on a block, in pieces."""
    return [
        CutJob(
            *(block, first, last, num_tokens, prefix, version),
            *(config.tokenizer, config.bert(), config.retro_gpt_chunk_length),
        )
        for first, last, num_tokens in ranges(tokens, block)
    ]


def ranges(tokens: IndexedDataset, block: DocumentBlock) -> Iterator[tuple[int, int, int]]:
    """The documents of a block as ranges (first, last, tokens) of at least `JOB_TOKENS` tokens, the
    last one apart."""
    bounds = tokens.document_places(np.arange(block.first, block.last + 1))
    steps = np.arange(bounds[0] + JOB_TOKENS, bounds[-1], JOB_TOKENS)
    ends = np.unique(np.searchsorted(bounds, steps)) + block.first
    cuts = [block.first, *ends[(ends > block.first) & (ends < block.last)].tolist(), block.last]
    for first, last in pairwise(cuts):
        yield first, last, int(bounds[last - block.first] - bounds[first - block.first])


def cut_job(job: CutJob) -> Rows:
    """(n, 4) all chunks of the job's documents."""
    source, gpt = open_tokens(job.prefix, job.version), gpt_tokenizer(job.gpt)
    bounds = source.document_places(np.arange(job.first, job.last + 1))
    tokens = source.get_flat(int(bounds[0]), int(bounds[-1]))
    bounds -= bounds[0]
    bad = outside(tokens, gpt.vocab_size)
    if len(bad):  # the library would drop them without a word
        document = int(np.searchsorted(bounds, bad[0], "right")) - 1
        sequence = int(source.document_indices[job.first + document])
        place = int(bad[0] - bounds[document])
        raise fault(source, sequence, place, int(tokens[bad[0]]), gpt.vocab_size)
    return chunk_rows(tokens, bounds, job.first, gpt, bert_tokenizer(job.bert), job.chunk_length)


@cache
def open_tokens(prefix: str, version: str) -> IndexedDataset:
    """Token files, opened once a process and not mapped: each token is read once, and what is
    mapped counts as memory."""
    return IndexedDataset(prefix, "file" if is_local(prefix) else "auto")


@cache
def gpt_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of the token files, built once a process; it only decodes."""
    return build_tokenizer(config)


@cache
def bert_tokenizer(config: TokenizerConfig) -> WordPieceTokenizer:
    """The tokenizer that counts the tokens of a chunk, built once a process."""
    return build_wordpiece(config)


def version_of(prefix: str) -> str:
    """The version of a .bin, or of the parts of a virtual dataset."""
    return " ".join(store.info(url).version for url in files_of(prefix).values())
