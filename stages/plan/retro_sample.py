"""What small runs of Retro's steps took, read from their manifests, and lines through it."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import basename, join
from trainyard.charts.numbers import is_number
from trainyard.errors import ArtifactError, ConfigError

STEPS = ("retro_db", "retro_embed", "faiss_train", "faiss_add", "faiss_query")

Point = tuple[float, float]
"""(amount of work, seconds or bytes)."""


@dataclass(frozen=True, slots=True)
class Line:
    """fixed + each x amount of work."""

    fixed: float
    each: float

    def at(self, work: float) -> float:
        """The value for so much work."""
        return self.fixed + self.each * work


def fit(points: Sequence[Point]) -> Line:
    """The line through measured points with the least squares of relative errors, so that small
    runs count as much as large ones. With one amount of work, or where the fixed part would be
    negative, it goes through zero."""
    used = [(x, y) for x, y in points if x > 0 and y > 0]
    assert used, "nothing was measured"
    weights = [1 / y**2 for _, y in used]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, used, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, used, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, used, strict=True))
    if spread > 1e-9 * total * mean_x**2:
        together = sum(
            w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, used, strict=True)
        )
        line = Line(mean_y - together / spread * mean_x, together / spread)
        if line.fixed >= 0 and line.each > 0:
            return line
    ratios = [(x / y, (x / y) ** 2) for x, y in used]
    return Line(0.0, sum(r for r, _ in ratios) / sum(square for _, square in ratios))


@dataclass(frozen=True, slots=True)
class IndexSample:
    """A measured index."""

    num_vectors: int
    dimensions: int
    num_lists: int
    nprobe: int
    imbalance: float
    """How many more vectors than on average are in the list of a query."""
    index_str: str


@dataclass(slots=True)
class Measured:
    """The points of all runs. Work of a step is counted as `retro_steps` says."""

    database: list[Point] = field(default_factory=list)
    """(chunks, seconds)."""
    database_bytes: list[Point] = field(default_factory=list)
    embedding: list[Point] = field(default_factory=list)
    """(chunks, seconds)."""
    training: list[tuple[int, IndexSample, float]] = field(default_factory=list)
    """(vectors, index, seconds)."""
    adding: list[tuple[IndexSample, float, float]] = field(default_factory=list)
    """(index, seconds of adding, seconds of the rest: reading, recall, writing)."""
    queries: list[tuple[IndexSample, float]] = field(default_factory=list)
    """(index, seconds of a query)."""
    num_saved: int = 20


def read_measured(urls: Sequence[str]) -> Measured:
    """All runs together.

    Raises ConfigError for runs without one of the steps, or whose index has no lists."""
    measured = Measured()
    for url in urls:
        _add_run(measured, url)
    points: dict[str, Sized] = {
        "retro_db": measured.database,
        "retro_embed": measured.embedding,
        "faiss_train": measured.training,
        "faiss_add": measured.adding,
        "faiss_query": measured.queries,
    }
    lacking = [step for step, found in points.items() if not found]
    if lacking:
        raise ConfigError(
            f"--retro-measured {' '.join(urls)}: no finished {' or '.join(lacking)} with an index "
            "of lists, whose time grows as that of a large one; build the neighbours of a sample "
            "with --retro-index-str IVF256,SQ8, or of 20,000 chunks and more"
        )
    return measured


def _add_run(measured: Measured, url: str) -> None:
    manifests = _manifests(url)
    index = None
    for manifest in manifests.get("faiss_add", []):
        index = _index_of(url, manifest)
    for manifest in manifests.get("retro_db", []):
        chunks = _number(manifest.metrics, "chunks")
        measured.database.append((chunks, _seconds(manifest)))
        size = sum(record.size_bytes for record in manifest.files)
        measured.database_bytes.append((chunks, float(size)))
    for manifest in manifests.get("retro_embed", []):
        measured.embedding.append((_number(manifest.metrics, "chunks"), _seconds(manifest)))
    if index is None or not index.num_lists:
        return
    for manifest in manifests.get("faiss_train", []):
        vectors = int(_number(manifest.metrics, "training_vectors"))
        measured.training.append((vectors, index, _number(manifest.metrics, "train_seconds")))
    for manifest in manifests.get("faiss_add", []):
        seconds = _number(manifest.metrics, "add_seconds")
        measured.adding.append((index, seconds, max(_seconds(manifest) - seconds, 0.0)))
    for manifest in manifests.get("faiss_query", []):
        each = _number(manifest.metrics, "milliseconds_per_query") / 1e3
        measured.queries.append((index, each))
        measured.num_saved = int(manifest.config.get("retro_query_num_neighbors_save", 20))


def _manifests(url: str) -> dict[str, list[Manifest]]:
    """The finished steps below a folder, by name."""
    found: dict[str, list[Manifest]] = {}
    for name in sorted(store.list_files(url)):
        if basename(name) != MANIFEST:
            continue
        read = read_manifest(join(url, name))
        if read is not None and read[0].stage in STEPS:
            found.setdefault(read[0].stage, []).append(read[0])
    return found


def _index_of(url: str, manifest: Manifest) -> IndexSample:
    """The index that a faiss_add below `url` filled, by its document beside the manifest."""
    for name in sorted(store.list_files(url)):
        if basename(name) != "index.json":
            continue
        document = store.read_json(join(url, name))
        if document.get("num_vectors") == manifest.metrics.get("vectors"):
            return IndexSample(
                num_vectors=int(document["num_vectors"]),
                dimensions=int(document["dimensions"]),
                num_lists=int(document["num_lists"]),
                nprobe=int(document["nprobe"]),
                imbalance=float(manifest.metrics.get("list_imbalance", 1.0)),
                index_str=str(document["index_str"]),
            )
    raise ArtifactError(f"{url}: no index.json of the index that faiss_add filled; run it again")


def _number(metrics: dict[str, Any], name: str) -> float:
    value = metrics.get(name)
    if not is_number(value):
        raise ArtifactError(f"a measured run has no {name} in its manifest; run that step again")
    return float(value)


def _seconds(manifest: Manifest) -> float:
    return _number(manifest.run, "seconds")
