"""What a step of a Retro costs beside one of a GPT of the same depth and width: measured, and by
the operations of both.

    python -m benchmarks.retro_step                          the shape of 345M, one GPU
    python -m benchmarks.retro_step --shape small --runs 3   a small one, on a CPU

Both are `stages.pretrain` as a user starts it, in turn, on the same samples; medians of the steps
after the warm-up. Needs no data: tokens are random, every document is a whole number of samples,
and neighbours are random chunks, one in eight of them the last of its document (padding). What is
made takes 10 MB with the default shape.
Needs torch and h5py."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from trainyard.artifacts import inputs
from trainyard.config import from_dict
from trainyard.corpus.indexed import IndexedWriter
from trainyard.models.costs.flops import flops_per_iteration as of_gpt
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.retro.config import RetroConfig
from trainyard.models.retro.flops import flops_per_iteration as of_retro
from trainyard.retrieval.dataset_infos import INFOS, DatasetInfo
from trainyard.retrieval.hdf5 import merged_name
from trainyard.retrieval.neighbors import DOCUMENT, NeighborsDocument, block_name, write_block
from trainyard.training.options.samples import RunSamplesConfig
from trainyard.training.run_samples import open_chunks

CHUNK = 64
NUM_NEIGHBORS = 2
DOCUMENT_CHUNKS = 8
BAR = 1.1


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder, its batch, and how many steps are run."""

    layers: int
    hidden: int
    heads: int
    seq: int
    mbs: int
    vocab: int
    steps: int
    warm_up: int

    def model(self) -> dict[str, Any]:
        """Options of both models."""
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "seq_length": self.seq,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "position_embedding_type": "rope",
        }

    def retro(self) -> dict[str, Any]:
        """Options of the Retro alone."""
        dropouts = ("retro_encoder_hidden_dropout", "retro_encoder_attention_dropout")
        return {"retro_num_neighbors": NUM_NEIGHBORS, **dict.fromkeys(dropouts, 0.0)}


SHAPES = {
    "345m": Shape(24, 1024, 16, 2048, 8, 50304, 20, 10),
    "843m": Shape(24, 1536, 16, 2048, 8, 50304, 20, 10),
    "small": Shape(6, 256, 8, 512, 2, 4096, 12, 4),
}


def write_project(folder: Path, shape: Shape) -> dict[str, Any]:
    """Token files, a database of them, and a table of neighbours; returns options of pretrain."""
    samples = shape.mbs * (shape.steps + shape.warm_up)
    random = np.random.default_rng(1)
    num_documents = samples * shape.seq // (CHUNK * DOCUMENT_CHUNKS) + 8
    prefix = folder / "random"
    dtype = np.uint16 if shape.vocab < 65500 else np.int32
    with prefix.with_suffix(".bin").open("wb") as out, prefix.with_suffix(".idx").open("wb") as idx:
        writer = IndexedWriter(out, dtype)
        for _ in range(num_documents):
            size = CHUNK * DOCUMENT_CHUNKS
            writer.add_document([random.integers(0, shape.vocab - 1, size).astype(dtype)])
        writer.write_index(idx)
    num_chunks = _write_database(folder / "db", num_documents)
    options = run_options(shape, prefix)
    config = from_dict(RunSamplesConfig, options)
    chunks = open_chunks(config, "train", CHUNK)
    table = random.integers(0, num_chunks, (len(chunks), NUM_NEIGHBORS))
    (folder / "neighbors").mkdir()
    name = block_name(0, len(table), len(table))
    write_block(folder / "neighbors" / name, table, table.astype(np.float32))
    database = str(folder / "db")
    document = NeighborsDocument(
        samples=chunks.identity(),
        num_chunks=len(table),
        num_neighbors=NUM_NEIGHBORS,
        database_digest=inputs.resolve("retro_db", (database,)).digest,
        index_digest="0" * 64,
        num_neighbors_query=NUM_NEIGHBORS,
        nprobe=1,
        ef_search=1,
        mean_neighbors=NUM_NEIGHBORS,
        share_fewer=0.0,
        share_none=0.0,
    )
    (folder / "neighbors" / DOCUMENT).write_text(json.dumps(document.to_document()))
    tables = {"retro_train_neighbors": str(folder / "neighbors"), "retro_db": database}
    return {**tables, "retro_db_data_path": [str(prefix)]}


def _write_database(folder: Path, num_documents: int) -> int:
    """The chunks of documents of `DOCUMENT_CHUNKS` chunks each; how many there are."""
    (folder / "merged").mkdir(parents=True)
    count = num_documents * DOCUMENT_CHUNKS
    numbers = np.arange(count)
    starts = numbers % DOCUMENT_CHUNKS * CHUNK
    documents = numbers // DOCUMENT_CHUNKS
    columns = (0 * numbers, documents, starts, starts + CHUNK, 0 * numbers + CHUNK)
    ends = (np.arange(num_documents) + 1) * DOCUMENT_CHUNKS
    offsets = (0 * ends, np.arange(num_documents), ends)
    with h5py.File(folder / merged_name("train"), "w", libver="earliest") as file:
        file.create_dataset("chunks", data=np.stack(columns, axis=1).astype(np.uint32))
        file.create_dataset("doc_offsets", data=np.stack(offsets, axis=1).astype(np.uint64))
        file.create_dataset("n_written", data=np.array([count], np.uint64))
    info = DatasetInfo(
        ratio=1.0,
        prefix="random",
        n_docs=num_documents,
        n_docs_train=num_documents,
        n_chunks=count,
        n_chunks_train=count,
        n_chunks_invalid=0,
        n_chunks_sampled=0,
    )
    (folder / INFOS).write_text(json.dumps([asdict(info)]))
    return count


def run_options(shape: Shape, prefix: Path) -> dict[str, Any]:
    """That decide the samples."""
    return {
        "data_path": [str(prefix)],
        "split": "100,0,0",
        "seq_length": shape.seq,
        "global_batch_size": shape.mbs,
        "train_iters": shape.steps + shape.warm_up,
        "eval_iters": 0,
    }


def measure(shape: Shape, folder: Path, more: dict[str, Any], extra: list[str]) -> dict[str, float]:
    """A run of pretrain: median seconds of a step, share of waiting for data, gigabytes."""
    save = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    options = {
        **run_options(shape, folder / "random"),
        **shape.model(),
        **more,
        "micro_batch_size": shape.mbs,
        "lr": 1e-4,
        "log_interval": 1,
        "num_workers": 2,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": shape.vocab - 1,
        "save": save,
    }
    document = {k: str(v) if isinstance(v, Path) else v for k, v in options.items()}
    config = save.with_suffix(".json")
    config.write_text(json.dumps(document))
    words = [sys.executable, "-m", "stages.pretrain", "--config", str(config), *extra]
    words += ["--no-save-optim", "--save-performance-summary"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-4000:]}")
    lines = [json.loads(line) for line in (save / "timings.jsonl").read_text().splitlines()]
    steady = [line for line in lines if line["step"] > shape.warm_up]
    summary = json.loads((save / "performance.json").read_text())
    return {
        "seconds": statistics.median(line["ms"] for line in steady) / 1e3,
        "least": min(line["ms"] for line in steady) / 1e3,
        "data_wait": summary["data_wait_share"],
        "gigabytes": summary["memory_bytes"]["peak"] / 1e9,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="345m")
    parser.add_argument("--runs", type=int, default=1, help="of each model, in turn")
    parser.add_argument("--scratch", type=Path, help="unset: a temporary folder")
    args, extra = parser.parse_known_args()
    shape = SHAPES[args.shape]
    folder = args.scratch or Path(tempfile.mkdtemp(prefix="trainyard-retro-step-"))
    folder.mkdir(parents=True, exist_ok=True)
    tables = write_project(folder, shape)
    if args.shape != "small":
        extra = ["--bf16", *extra]
    vocab = shape.vocab
    predicted = of_retro(RetroConfig(**shape.model(), **shape.retro()), vocab, shape.mbs) / (
        of_gpt(GPTConfig(**shape.model()), vocab, shape.mbs)
    )
    models: dict[str, dict[str, Any]] = {
        "gpt": {},
        "retro": {"model_type": "retro", **shape.retro(), **tables},
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for _ in range(args.runs):
        for name, more in models.items():
            found[name].append(measure(shape, folder, more, extra))
    for name, runs in found.items():
        best = min(runs, key=lambda run: run["seconds"])
        rate = shape.mbs * shape.seq / best["seconds"]
        print(
            f"{name}: {1e3 * best['seconds']:.1f} ms a step (least {1e3 * best['least']:.1f}), "
            f"{rate:,.0f} tok/s, data wait {best['data_wait']:.2%}, {best['gigabytes']:.1f} GB"
        )
    ratio = min(r["seconds"] for r in found["retro"]) / min(r["seconds"] for r in found["gpt"])
    print(
        f"{args.shape}: a step of the Retro takes {ratio:.2f} times one of the GPT, by operations "
        f"{predicted:.2f}: {ratio / predicted:.2f} (bar {BAR}); data wait "
        f"{max(r['data_wait'] for r in found['retro']):.2%} (bar 2 %)"
    )


if __name__ == "__main__":
    main()
