"""Memory of adding to an index, beside the size of its codes.

    python -m benchmarks.retro memory --scratch /tmp/retro

Vectors of 512 dimensions around 2,000 centers, some of which have most of them, as topics have. The
stage fills one index with 100,000 of them and one with 200,000, in one process and, the larger one,
in four shares that are joined. What a vector adds to the peak is the bar's measure: a process alone
takes about 110 MB, which faiss, numpy and h5py need."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from benchmarks.corpus import Setting, report, stage
from benchmarks.measure import run_once
from trainyard.retrieval.vectors import block_name, write_block

DIMENSIONS, CENTERS, LISTS = 512, 2000, 512
CODE_BYTES = DIMENSIONS + 8
"""Of a vector in a list of SQ8, with its id."""
BLOCK = 50_000
SIZES = (100_000, 200_000)
TRAINING = LISTS * 40
SHARES = 4
BAR = 1.2


def compare(setting: Setting) -> None:
    """Two rows of the table."""
    folder = setting.scratch / "memory"
    shutil.rmtree(folder, ignore_errors=True)
    one_thread = {"OMP_NUM_THREADS": "1"}
    for count in (TRAINING, *SIZES):
        write_vectors(folder / f"vectors-{count}", count)
    trained = ("--embeddings", str(folder / f"vectors-{TRAINING}"))
    index_str = ("--retro-index-str", f"IVF{LISTS},SQ8", "--output-dir", str(folder / "empty"))
    run_once(stage("stages.faiss_train", *trained, *index_str), one_thread)

    def add(count: int, *options: str) -> int:
        words = ("--index", str(folder / "empty"), "--output-dir", str(folder / f"index-{count}"))
        words += ("--embeddings", str(folder / f"vectors-{count}"), *options)
        return run_once(stage("stages.faiss_add", *words), one_thread).peak_bytes

    small, large = (add(count) for count in SIZES)
    each = (large - small) / (SIZES[1] - SIZES[0])
    figures = (
        f"{large / 1e6:.0f} MB, with half as many {small / 1e6:.0f}: {each:.0f} bytes a vector, of "
        f"which {CODE_BYTES} are code and id: {each / CODE_BYTES:.2f}x"
    )
    report(f"memory to add {SIZES[1]:,} vectors", figures, f"{BAR}x", each <= BAR * CODE_BYTES)

    shutil.rmtree(folder / f"index-{SIZES[1]}")
    count = ("--world-size", str(SHARES))
    for rank in range(SHARES):
        add(SIZES[1], *count, "--rank", str(rank))
    joined = add(SIZES[1], *count)
    alone, codes = large - SIZES[1] * each, SIZES[1] * CODE_BYTES
    most = alone + BAR * (codes + codes / SHARES)
    figures = f"{joined / 1e6:.0f} MB, with one share beside the whole"
    report(
        f"memory to join them from {SHARES} shares",
        figures,
        f"{most / 1e6:.0f} MB: {BAR}x both",
        joined <= most,
    )


def write_vectors(folder: Path, count: int) -> None:
    """Embeddings in blocks; the same ones each time."""
    random = np.random.default_rng(0)
    centers = random.standard_normal((CENTERS, DIMENSIONS), np.float32)
    (folder / "blocks").mkdir(parents=True)
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        chosen = centers[random.zipf(1.3, end - start) % CENTERS]
        vectors = chosen + 0.7 * random.standard_normal(chosen.shape, np.float32)
        write_block(folder / block_name(start, end, count), vectors.astype(np.float32))
