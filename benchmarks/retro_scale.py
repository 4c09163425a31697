"""Retro's stages at scale, on this machine: time, processor time, memory and disk of each.

    python -m benchmarks.retro_scale --chunks 200000 --scratch /tmp/retro    some minutes
    python -m benchmarks.retro_scale --chunks 5000000 --scratch /tmp/retro   about an hour of a core
    python -m stages.plan --retro --retro-chunks 1000000000 --retro-query-chunks 200000000 \
        --retro-measured /tmp/retro/200000 /tmp/retro/5000000

The same command goes on at the step where it was stopped.

Token files hold the corpus again and again, each time with a sixth of its tokens replaced by others
of the corpus, so that neighbours are near and not equal. Chunks are embedded by
`benchmarks.topic_embedder`, since a BERT takes hours on a CPU; `plan` scales what a BERT took.

Data: --data (default ../shared/data) with corpora/corpus_en.jsonl and vocab/. Needs about 1 GB of
disk for a million chunks."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import topic_embedder
from benchmarks.corpus import Setting, gpt2, stage
from benchmarks.measure import run_once
from benchmarks.retro import token_files
from trainyard.corpus.indexed import IndexedDataset, IndexedWriter

CHUNK_LENGTH = 64
REPLACED = 1 / 6
"""Share of the tokens of a copy that are others."""

FIGURES = "figures.json"
"""What finished steps took, beside their folders: a run that was stopped goes on at its step."""

EMBEDDER = "topics"
FITTED = 8000
"""Chunks that the embedder is fitted to."""
SEQ_LENGTH = 2048
SAMPLES = 1000
TRAINING_POINTS = 40
"""Vectors for each list that train the index: 39 is faiss's least."""


def write_tokens(setting: Setting, num_chunks: int) -> str:
    """Token files with so many chunks: changed copies of the corpus."""
    target = setting.scratch / f"tokens-{num_chunks}"
    prefix = str(target / "corpus")
    if (target / "corpus.idx").exists():
        return prefix
    target.mkdir(exist_ok=True)
    corpus = IndexedDataset(token_files(setting, setting.corpus))
    documents = [next(iter(document)) for document in corpus.documents()]
    words = np.concatenate([document[:-1] for document in documents])
    random, left = np.random.default_rng(1), num_chunks
    with Path(f"{prefix}.bin").open("wb") as out, Path(f"{prefix}.tmp").open("wb") as idx:
        writer = IndexedWriter(out, documents[0].dtype)
        copy = 0
        while left > 0:
            for document in documents:
                length = min(len(document) - 1, left * CHUNK_LENGTH)
                tokens = np.append(document[:length], document[-1])
                if copy:
                    places = np.flatnonzero(random.random(length) < REPLACED)
                    tokens[places] = words[random.integers(0, len(words), len(places))]
                writer.add_document([tokens])
                left -= math.ceil(length / CHUNK_LENGTH)
                if left <= 0:
                    break
            copy += 1
        writer.write_index(idx)
    Path(f"{prefix}.tmp").rename(f"{prefix}.idx")
    return prefix


def fit_embedder(setting: Setting) -> Path:
    """The table of the embedder, fitted to texts of the corpus; made once."""
    table = setting.scratch / "topics.npz"
    if not table.exists():
        with setting.corpus.open() as lines:
            texts = [json.loads(line)["text"] for line in lines]
        pieces = [text[at : at + 300] for text in texts for at in range(0, len(text), 300)]
        chosen = np.random.default_rng(1).choice(len(pieces), FITTED, replace=False)
        topic_embedder.fit([pieces[number] for number in chosen], table)
    return table


def offer_embedder(folder: Path) -> None:
    """A package in a folder of the path that offers the embedder by an entry point."""
    info = folder / "topic_embedder-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: topic-embedder\nVersion: 1.0\n")
    line = f"{EMBEDDER} = benchmarks.topic_embedder:embed\n"
    (info / "entry_points.txt").write_text(f"[trainyard.embedders]\n{line}")


def commands(
    setting: Setting, prefix: str, project: Path, num_chunks: int, threads: int
) -> dict[str, tuple[list[str], Path]]:
    """Each step's command and the folder that it writes, in order."""
    gpt = [flag for flag in gpt2(setting) if flag != "--append-eod"]
    vocab = setting.vocab("bert/bert-base-uncased-vocab.txt")
    sampled = min(num_chunks, int(TRAINING_POINTS * 4 * math.sqrt(num_chunks)))
    chunks = ["--retro-db", str(project / "db"), "--data-path", prefix, *gpt]
    samples = ["--data-path", prefix, "--seq-length", str(SEQ_LENGTH), "--split", "98,2,0"]
    samples += ["--train-samples", str(SAMPLES), "--global-batch-size", "100", "--eval-iters", "0"]
    workers = ("--workers", str(threads))

    def embed(kind: str, *options: str) -> list[str]:
        words = ("--embedder", EMBEDDER, "--chunks", kind, *options, *workers)
        return stage("stages.retro_embed", *words)

    def at(name: str) -> str:
        return str(project / name)

    steps = {
        "db": [
            *stage("stages.retro_db", "--data-path", prefix, *gpt),
            *("--retro-bert-tokenizer-type", "BertWordPieceLowerCase"),
            *("--retro-bert-vocab-file", vocab, "--retro-index-ntrain", str(sampled)),
            *workers,
        ],
        "embeddings-sampled": embed("sampled", *chunks),
        "index_empty": stage(
            "stages.faiss_train", "--embeddings", at("embeddings-sampled"),
            "--index-size", str(num_chunks),
        ),
        "embeddings": embed("train", *chunks),
        "index": stage(
            "stages.faiss_add", "--index", at("index_empty"), "--embeddings", at("embeddings")
        ),
        "embeddings-samples": embed("pretraining", *samples, *gpt),
        "query/train": stage(
            "stages.faiss_query", "--index", at("index"), "--retro-db", at("db"),
            "--embeddings", at("embeddings-samples"), *samples,
        ),
    }  # fmt: skip
    return {
        name: ([*words, "--output-dir", at(name)], project / name) for name, words in steps.items()
    }


def megabytes(folder: Path) -> float:
    """What is in a folder, in 10^6 bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


@dataclass(frozen=True, slots=True)
class Figures:
    """What a step took."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    megabytes: float
    """Of its output."""

    def row(self, name: str) -> str:
        """A line of the table."""
        return (
            f"| {name} | {self.wall_seconds:,.0f} s | {self.cpu_seconds:,.0f} s | "
            f"{self.peak_bytes / 1e6:,.0f} MB | {self.megabytes:,.0f} MB |"
        )


def measured(words: list[str], environment: dict[str, str], folder: Path) -> Figures:
    """Run a step from nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    run = run_once(words, environment)
    return Figures(run.wall_seconds, run.cpu_seconds, run.peak_bytes, megabytes(folder))


def build(setting: Setting, num_chunks: int, threads: int = 1) -> Path:
    """Run every step, and print what each takes; returns the folder of the project. Steps with
    figures of an earlier call are whole and not run again."""
    offer_embedder(setting.scratch / "package")
    path = os.pathsep.join([str(setting.scratch / "package"), str(Path.cwd())])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
    environment[topic_embedder.FILE] = str(fit_embedder(setting))
    prefix = write_tokens(setting, num_chunks)
    project = setting.scratch / str(num_chunks)
    project.mkdir(exist_ok=True)
    kept = project / FIGURES
    figures: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    print("| step | wall | processor | peak memory | output |\n| --- | --- | --- | --- | --- |")
    for name, (words, folder) in commands(setting, prefix, project, num_chunks, threads).items():
        if name not in figures:
            figures[name] = asdict(measured(words, environment, folder))
            kept.write_text(json.dumps(figures, indent=1))
        print(Figures(**figures[name]).row(name), flush=True)
    return project


def project_of(setting: Setting, num_chunks: int) -> Path:
    """The folder of a project that is whole; built if it is not."""
    project = setting.scratch / str(num_chunks)
    is_whole = (project / "query/train/manifest.json").exists()
    return project if is_whole else build(setting, num_chunks)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--chunks", type=int, default=200_000)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--scratch", type=Path, required=True, help="keeps what is made")
    parser.add_argument("--threads", type=int, default=1, help="of each stage")
    args = parser.parse_args()
    scratch: Path = args.scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    project = build(Setting(args.data.resolve(), scratch, 1), args.chunks, args.threads)
    print((project / "index" / "index.json").read_text())


if __name__ == "__main__":
    main()
