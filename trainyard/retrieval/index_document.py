"""`index.json`, beside an index: what it is, what it was trained on, how much it finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.inputs import read_checked_json
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError, ConfigError
from trainyard.retrieval.checked_fields import check_fields

FORMAT_VERSION = 1
DOCUMENT = "index.json"
EMPTY = "empty.faissindex"
"""A trained index without vectors."""
ADDED = "added.faissindex"
"""An index with all vectors; the id of a vector is its place."""


def read_index_document(folder_url: str, option: str = "the index") -> IndexDocument:
    """That of a folder, which `option` names in errors. ArtifactError if there is none, or if the
    manifest of the folder has another."""
    url = join(folder_url, DOCUMENT)
    if not store.exists(url):
        raise ArtifactError(
            f"{option} {folder_url}: no {DOCUMENT} there; give the output of faiss_train or "
            "faiss_add"
        )
    return IndexDocument.from_document(read_checked_json(url), url)


def shard_names(num_shards: int) -> list[str]:
    """The files of a filled index."""
    if num_shards == 1:
        return [ADDED]
    return [f"added-{i:05d}-of-{num_shards:05d}.faissindex" for i in range(num_shards)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecall:
    """Recall of a search with one setting."""

    nprobe: int
    """Lists that were searched."""
    recall: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """What the index finds of the nearest vectors (`retrieval/recall.py`)."""

    neighbors: int
    """k of recall@k."""
    sample: int
    """Vectors that were searched for."""
    seed: int
    curve: tuple[SearchRecall, ...]
    """In increasing order of nprobe."""

    def cheapest(self, least: float) -> SearchRecall:
        """The search of the fewest lists with that recall; without any, the best."""
        fitting = [search for search in self.curve if search.recall >= least]
        return fitting[0] if fitting else max(self.curve, key=lambda search: search.recall)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexDocument:
    """An index."""

    index_str: str
    """For faiss's index_factory."""
    reason: str
    """Why this one."""
    dimensions: int
    num_lists: int
    """Of an inverted file; 0 for another index."""
    code_bytes: int
    """For each vector; 0 for an index without codes of fixed size."""
    num_training: int
    """Vectors that it was trained on."""
    num_vectors: int = 0
    """Vectors in it."""
    add_fraction: float = 1.0
    """Share of the embeddings that it holds; ids are those of all."""
    num_shards: int = 1
    """Files that it is in, `shard_names`; each has vectors of consecutive ids."""
    nprobe: int = 1
    """Lists that a search visits by default."""
    recall: Recall | None = None
    """None for an empty index."""

    def to_document(self) -> dict[str, Any]:
        """JSON-able."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @staticmethod
    def from_document(document: Mapping[str, Any], where: str) -> IndexDocument:
        """The inverse. Raises ArtifactError for a document of another form or version."""
        try:
            values = dict(document)
            if values.pop("format_version") != FORMAT_VERSION:
                raise ValueError("another version")
            recall = values.pop("recall")
            if recall is not None:
                recall = dict(recall)
                curve = tuple(
                    check_fields(SearchRecall(**search)) for search in recall.pop("curve")
                )
                if not curve:
                    raise ValueError("a recall without a search")
                recall = check_fields(Recall(**recall, curve=curve))
            return check_fields(IndexDocument(**values, recall=recall))
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise ArtifactError(
                f"{where}: does not describe an index ({error!r}); build the index again"
            ) from error
