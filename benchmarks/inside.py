"""Figures of single functions, measured within a fresh process.

python -m benchmarks.inside NAME SCRATCH RUNS        prints numbers, see each function"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trainyard.corpus.indexed import IndexedDataset, IndexedWriter
from trainyard.datasets.gpt import GPTDataset, SampleFormat
from trainyard.datasets.samples import build_sample_indices

SEQ_LENGTH = 2048
SEED = 1234
MILLION = 1_000_000
TOKENS_A_DOCUMENT = 1000
VOCAB_SIZE = 50257
BATCH = 32
FETCHES = 60_000


def lengths_of(num_documents: int) -> np.ndarray:
    """Document lengths whose mean is 1,000 tokens, from 1 to 1,999."""
    random = np.random.default_rng(SEED)
    return random.integers(1, 2 * TOKENS_A_DOCUMENT, num_documents, dtype=np.int32)


def index(scratch: Path, runs: int) -> list[float]:
    """Median seconds of the three indices of 1 M documents, one epoch."""
    lengths = lengths_of(MILLION)
    documents = np.arange(MILLION, dtype=np.int32)
    seconds = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        build_sample_indices(lengths, documents, SEQ_LENGTH, SEED)
        seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds[1:])]


def index_large(scratch: Path, runs: int) -> list[float]:
    """Seconds of 100 M documents, once; bytes a document held beyond the input and the indices."""
    count = 100 * MILLION
    lengths = lengths_of(count)
    documents = np.arange(count, dtype=np.int32)
    before = _resident_bytes()
    peak = _Peak()
    peak.start()
    began = time.perf_counter()
    made = build_sample_indices(lengths, documents, SEQ_LENGTH, SEED)
    seconds = time.perf_counter() - began
    peak.over.set()
    peak.join()
    arrays = (made.document_index, made.sample_index, made.shuffle_index)
    kept = sum(array.nbytes for array in arrays)
    return [seconds, (peak.bytes - before - kept) / count]


def fetch(scratch: Path, runs: int) -> list[float]:
    """Median random samples a second."""
    return _fetch(scratch, runs, _form())


def fetch_bounds(scratch: Path, runs: int) -> list[float]:
    """The same with document bounds, and positions that begin again with each document."""
    return _fetch(scratch, runs, _form(reset_position_ids=True, reset_attention_mask=True))


def _form(**options: bool) -> SampleFormat:
    return SampleFormat(SEQ_LENGTH, SEED, VOCAB_SIZE, eod=VOCAB_SIZE - 1, **options)


def _fetch(scratch: Path, runs: int, form: SampleFormat) -> list[float]:
    """As a training loop does: batches of random indices, each to arrays of (batch, seq)."""
    indexed = IndexedDataset(str(_token_file(scratch)))
    dataset = GPTDataset(indexed, np.arange(len(indexed), dtype=np.int32), None, form)
    random = np.random.default_rng(SEED)
    rates = []
    for number in range(runs + 1):
        batches = random.integers(0, len(dataset), (FETCHES // BATCH, BATCH)).tolist()
        began = time.perf_counter()
        for batch in batches:
            dataset.__getitems__(batch)
        rates.append(FETCHES / BATCH * BATCH / (time.perf_counter() - began) if number else 0)
    return [statistics.median(rates[1:])]


def _token_file(scratch: Path) -> Path:
    """1 M documents, 1 B tokens, each document with its end."""
    prefix = scratch / "billion"
    if not prefix.with_suffix(".idx").exists():
        lengths = lengths_of(MILLION)
        random = np.random.default_rng(SEED)
        with (
            prefix.with_suffix(".bin").open("wb") as out,
            prefix.with_suffix(".tmp").open("wb") as i,
        ):
            writer = IndexedWriter(out, np.uint16)
            for start in range(0, MILLION, 10_000):
                part = lengths[start : start + 10_000]
                ids = random.integers(0, VOCAB_SIZE - 1, int(part.sum()), dtype=np.uint16)
                ends = np.cumsum(part)
                ids[ends - 1] = VOCAB_SIZE - 1
                for first, last in zip(ends - part, ends, strict=True):
                    writer.add_document([ids[first:last]])
            writer.write_index(i)
        prefix.with_suffix(".tmp").rename(prefix.with_suffix(".idx"))
    np.fromfile(prefix.with_suffix(".bin"), np.uint8)  # into the page cache
    return prefix


class _Peak(threading.Thread):
    """Watches what this process holds in memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.bytes = 0

    def run(self) -> None:
        while not self.over.wait(0.01):
            self.bytes = max(self.bytes, _resident_bytes())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


FIGURES: dict[str, Callable[[Path, int], list[float]]] = {
    "index": index,
    "index_large": index_large,
    "fetch": fetch,
    "fetch_bounds": fetch_bounds,
}


if __name__ == "__main__":
    print(*FIGURES[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3])))
