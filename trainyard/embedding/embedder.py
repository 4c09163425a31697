"""Embedders: texts in, vectors out. A BERT, or a function of another package.

Work has two halves, so that the second never waits for the first: `prepare` turns texts into tokens
and may run on another thread; `embed` computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainyard.corpus.workers import Crew, check_stop, run_jobs
from trainyard.embedding.batches import Rows, cut_batches, framed_rows
from trainyard.embedding.config import EmbeddingConfig
from trainyard.embedding.encoder import Encoder
from trainyard.embedding.pooling import pool
from trainyard.embedding.ragged import encode_ragged, groups_of
from trainyard.tokenizers.wordpiece import WordPieceTokenizer

Vectors = NDArray[np.float32]
P = TypeVar("P")

TEXTS_AT_ONCE = 4096
"""Texts that are tokenized between two looks whether the run has ended."""

CPU_BATCH_TOKENS = 1024
"""Most tokens of a batch on a CPU: with more, hidden states leave its cache and the memory that the
allocator keeps, which takes a tenth to a third more time."""


class Embedder(Protocol[P]):
    """Texts in, vectors out."""

    @property
    def dimensions(self) -> int:
        """Of a vector."""

    def prepare(self, texts: Sequence[str]) -> tuple[P, int]:
        """What `embed` takes for these texts, and its number of tokens. Safe on any thread."""

    def embed(self, prepared: P) -> Vectors:
        """(texts, dimensions) vectors, in the order of the texts."""


@dataclass(frozen=True, slots=True)
class BertEmbedder:
    """Vectors by the encoder of a BERT.

    On a CPU, batches are computed side by side, each by one thread, so the bits of a vector do not
    depend on the number of threads."""

    encoder: Encoder
    tokenizer: WordPieceTokenizer
    config: EmbeddingConfig
    workers: int
    """Threads, on a CPU."""

    @property
    def dimensions(self) -> int:
        """Of a vector."""
        return self.encoder.dimensions

    @property
    def device(self) -> torch.device:
        """Of the encoder."""
        return self.encoder.model.device

    def prepare(self, texts: Sequence[str]) -> tuple[Rows, int]:
        """The tokens of these texts."""
        parts = []
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            check_stop()
            parts.append(self.tokenizer.encode_flat(texts[first : first + TEXTS_AT_ONCE]))
        ids = np.concatenate([np.zeros(0, np.uint32), *(flat for flat, _ in parts)])
        lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(b) for _, b in parts)])
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        kind, longest = self.tokenizer, self.config.retro_bert_max_chunk_length
        rows = framed_rows(ids, bounds, longest, kind.cls, kind.sep, kind.pad_id)
        return rows, len(rows.tokens)

    def embed(self, prepared: Rows) -> Vectors:
        """The vectors of prepared texts."""
        on_cpu = self.device.type == "cpu"
        most = self.config.batch_tokens
        batches = cut_batches(prepared.lengths, min(most, CPU_BATCH_TOKENS) if on_cpu else most)
        work = _Work(self, prepared)
        if on_cpu:
            with _one_thread_each():
                for _ in run_jobs(work.compute, batches, Crew(0, self.workers), {}):
                    pass
        else:
            for batch in batches:
                work.compute(batch)
        vectors: Vectors = work.vectors.cpu().numpy()
        return vectors


class _Work:
    """The texts of a block on the device, and the place of their vectors."""

    def __init__(self, embedder: BertEmbedder, rows: Rows) -> None:
        device = embedder.device
        self.embedder, self.rows = embedder, rows
        self.bounds = rows.bounds
        self.tokens = torch.from_numpy(rows.tokens).to(device)
        self.positions = torch.from_numpy(rows.positions).to(device)
        self.order = torch.from_numpy(rows.order).to(device)
        shape = len(rows.lengths), embedder.dimensions
        self.vectors: Tensor = torch.empty(shape, dtype=torch.float32, device=device)

    def compute(self, batch: range) -> None:
        """Fill in the vectors of a batch; on a CPU by one thread, from any."""
        if self.vectors.device.type == "cpu":
            torch.set_num_threads(1)  # of this thread
        config, texts = self.embedder.config, slice(batch.start, batch.stop)
        tokens = slice(self.bounds[batch.start], self.bounds[batch.stop])
        groups = groups_of(self.rows.lengths[texts].tolist())
        with torch.inference_mode():
            hidden = encode_ragged(
                self.embedder.encoder.model, self.tokens[tokens], self.positions[tokens], groups
            )
            found = pool(hidden, groups, config.pooling, config.normalize)
            self.vectors[self.order[texts]] = found


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let torch compute every operation by one thread; afterwards as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
