"""Adding to an index and searching in it, beside plain calls of faiss on the same vectors.

The vectors are those of 200,000 real chunks by `benchmarks.topic_embedder`, the index is the
default one. One thread, ours and plain calls in turn in one process; the least processor time of
several runs, as other work on the machine only adds to it. Both read the vectors to add from HDF5,
ours compares their digests and keeps codes for a rerun; ours drops a sample's own documents from
what it finds."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import h5py
import numpy as np

from benchmarks.corpus import Setting, report
from benchmarks.retro_scale import SAMPLES, SEQ_LENGTH, project_of
from stages.faiss_add.fill import fill
from stages.faiss_query.search import BlockSearch, Rules, Search
from stages.runtime.context import StageRun
from trainyard.artifacts.output import Output
from trainyard.config import from_dict
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.database_sources import find_datasets
from trainyard.retrieval.index_document import ADDED, EMPTY, IndexDocument
from trainyard.retrieval.shards import Shards
from trainyard.retrieval.vectors import DATASET, EmbeddingBlocks
from trainyard.training.options.samples import RunSamplesConfig
from trainyard.training.run_samples import open_chunks

NUM_CHUNKS = 200_000
QUERIES = 4096
FOUND, KEPT, EF_SEARCH = 200, 20, 256
BAR = 1.1
RECALL = 0.9


def compare(setting: Setting) -> None:
    """Three rows of the table."""
    faiss.omp_set_num_threads(1)
    project = project_of(setting, NUM_CHUNKS)
    blocks = blocks_of(project / "embeddings")
    seconds = least_of(
        {
            "ours": lambda: add(setting, project, blocks),
            "plain": lambda: add_plainly(project, blocks),
        },
        setting.runs,
    )
    ours, plain = seconds["ours"], seconds["plain"]
    figures = f"{ours:.2f} CPU s, plain {plain:.2f}: {ours / plain:.2f}x"
    report(f"add {blocks.num_vectors:,} vectors", figures, f"{BAR}x", ours <= BAR * plain)
    document = IndexDocument.from_document(
        json.loads((project / "index/index.json").read_text()), "index.json"
    )
    search = search_of(setting, project, document.nprobe)
    queries = search.embeddings.rows(np.arange(QUERIES))
    plain_index = search.search.index.parts[0]
    seconds = least_of(
        {
            "ours": lambda: search.neighbors(0, QUERIES, lambda _: None),
            "plain": lambda: plain_index.search(queries, FOUND),
        },
        setting.runs,
    )
    ours, plain = seconds["ours"], seconds["plain"]
    figures = (
        f"{1e3 * ours / QUERIES:.3f} CPU ms each, plain {1e3 * plain / QUERIES:.3f}: "
        f"{ours / plain:.2f}x"
    )
    report(f"query {QUERIES:,} chunks for {FOUND}", figures, f"{BAR}x", ours <= BAR * plain)
    assert document.recall is not None
    found = next(one for one in document.recall.curve if one.nprobe == document.nprobe)
    metrics = json.loads((project / "index/manifest.json").read_text())["metrics"]
    took = metrics["milliseconds_per_query"][str(found.nprobe)]
    figures = (
        f"{document.index_str}, nprobe {found.nprobe}: {found.recall:.3f} at {took:.3f} ms a query"
    )
    name = f"recall@{document.recall.neighbors}, {document.num_vectors:,} real chunks"
    report(name, figures, str(RECALL), found.recall >= RECALL)


def blocks_of(folder: Path) -> EmbeddingBlocks:
    """The embeddings in a folder."""
    files = [str(path) for path in sorted((folder / "blocks").iterdir())]
    return EmbeddingBlocks.find(files, str(folder))


def add(setting: Setting, project: Path, blocks: EmbeddingBlocks) -> None:
    """As the stage fills an index, from nothing."""
    folder = setting.scratch / "added"
    shutil.rmtree(folder, ignore_errors=True)
    stage = StageRun("faiss_add", {}, Output.directory(str(folder)), "benchmark")
    with contextlib.closing(stage):
        fill(faiss_index.load(project / "index_empty" / EMPTY), blocks, blocks.blocks, stage)
        stage.work.remove()


def add_plainly(project: Path, blocks: EmbeddingBlocks) -> None:
    """As one would with h5py and faiss."""
    index = faiss.read_index(str(project / "index_empty" / EMPTY))
    for block in blocks.blocks:
        with h5py.File(block.url) as file:
            index.add(file[DATASET][:])


def search_of(setting: Setting, project: Path, nprobe: int) -> BlockSearch:
    """The search of the stage, with the settings of an index; faiss's index has them from the first
    search on."""
    prefix = str(setting.scratch / f"tokens-{NUM_CHUNKS}" / "corpus")
    options = {
        **{"data_path": [prefix], "seq_length": SEQ_LENGTH, "split": "98,2,0"},
        **{"train_samples": SAMPLES, "global_batch_size": 100, "eval_iters": 0},
    }
    chunks = open_chunks(from_dict(RunSamplesConfig, options), "train", 64)
    index = faiss_index.load(project / "index" / ADDED)
    return BlockSearch(
        search=Search(Shards((index,)), nprobe, EF_SEARCH, FOUND),
        embeddings=blocks_of(project / "embeddings-samples"),
        rules=Rules(
            chunks,
            ChunkDatabase(str(project / "db")),
            find_datasets(str(project / "db"), chunks.prefixes),
            excluded=None,
        ),
        num_kept=KEPT,
    )


def least_of(works: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Least processor time of each, in turn, after one run that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(runs + 1):
        for name, work in works.items():
            began = time.process_time()
            work()
            if number:
                found[name].append(time.process_time() - began)
    return {name: min(each) for name, each in found.items()}
