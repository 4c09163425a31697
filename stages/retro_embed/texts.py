"""The texts of chunks, from the GPT tokens of a database or of the samples of a training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stages.retro_embed.chunk_options import DatabaseChunks, SampleChunks
from stages.retro_embed.config import RetroEmbedConfig
from stages.retro_embed.inputs import num_in_base, open_database
from stages.retro_embed.tokenizers import check_tokenizer
from stages.runtime.context import StageRun
from trainyard.corpus.workers import check_stop
from trainyard.datasets.vocabulary import outside
from trainyard.errors import DataError
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.pretraining_chunks import SAMPLES, PretrainingChunks, as_document
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.registry import build_tokenizer
from trainyard.training.run_samples import open_chunks

Ints = NDArray[np.int64]

CHUNKS_AT_ONCE = 1024
"""Chunks that become text between two looks whether the run has ended."""


class Chunks(Protocol):
    """GPT tokens of chunks, by number."""

    def __len__(self) -> int:
        """The number of chunks."""

    def tokens(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """(n, longest) tokens of the chunks `start` up to `stop`, and (n,) how many each has."""


@dataclass(frozen=True, slots=True)
class OfDatabase:
    """The chunks of a database."""

    database: ChunkDatabase
    first: int
    """Number of the first one; those before it are left out."""

    def __len__(self) -> int:
        return len(self.database) - self.first

    def tokens(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """See `Chunks`."""
        numbers = self.first + np.arange(start, stop)
        rows = self.database.rows(numbers).astype(np.int64)
        counts = rows[:, 3] - rows[:, 2]
        return self.database.token_rows(numbers, int(counts.max()), pad=0), counts


@dataclass(frozen=True, slots=True)
class OfSamples:
    """The chunks of the samples of a training."""

    chunks: PretrainingChunks

    def __len__(self) -> int:
        return len(self.chunks)

    def tokens(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """See `Chunks`."""
        rows = self.chunks.token_rows(start, stop)
        counts = (rows >= 0).sum(axis=1)  # below 0: padding at the end of the last sample
        return np.where(rows < 0, 0, rows), counts


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of chunks, by number."""

    chunks: Chunks
    gpt: Tokenizer
    where: str
    """Names the chunks in messages."""

    def __len__(self) -> int:
        return len(self.chunks)

    def read(self, start: int, stop: int) -> list[str]:
        """The texts of the chunks `start` up to `stop`: all their tokens, as Megatron-LM shows
        them. DataError for a token that the tokenizer does not have."""
        texts = []
        for first in range(start, stop, CHUNKS_AT_ONCE):
            check_stop()
            last = min(first + CHUNKS_AT_ONCE, stop)
            rows, counts = self.chunks.tokens(first, last)
            self._check(rows, first)
            texts += [
                self.gpt.decode(row[:count])
                for row, count in zip(rows.tolist(), counts.tolist(), strict=True)
            ]
        return texts

    def _check(self, rows: Ints, first: int) -> None:
        bad = outside(rows.ravel(), self.gpt.vocab_size)
        if len(bad):
            row, place = divmod(int(bad[0]), rows.shape[1])
            raise DataError(
                f"{self.where}: token {rows[row, place]} of chunk {first + row} is outside the "
                f"vocabulary of {self.gpt.vocab_size}; give the tokenizer of the token files "
                "(--tokenizer-type, --tokenizer-model, --vocab-file)"
            )


def write_samples(stage: StageRun, chunks: Chunks) -> None:
    """Write `SAMPLES`, of chunks of samples."""
    if isinstance(chunks, OfSamples):
        stage.write_json(SAMPLES, as_document(chunks.chunks.identity()))


def open_texts(config: RetroEmbedConfig, stage: StageRun) -> Texts:
    """The texts that the options name."""
    # Only decodes; the fast engine would be built for nothing.
    gpt = build_tokenizer(replace(config.tokenizer, use_gigatoken=False))
    source = config.source
    if isinstance(source, DatabaseChunks):
        check_tokenizer(source, config.tokenizer, stage)
        database = open_database(source)
        first = num_in_base(source, database)
        return Texts(OfDatabase(database, first), gpt, database.url)
    assert isinstance(source, SampleChunks)
    chunks = open_chunks(
        source.samples, source.retro_query_split, source.retro_gpt_chunk_length, gpt.vocab_size
    )
    return Texts(OfSamples(chunks), gpt, f"the {source.retro_query_split} samples")
