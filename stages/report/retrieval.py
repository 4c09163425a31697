"""What a Retro retrieves: recall of the index, the table of neighbours, and some chunks with their
neighbours as text. From the output of faiss_query, and from what its manifest says it was made of:
the index, the chunk database and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.report.lineage import Ancestry, key_of
from trainyard.artifacts import inputs
from trainyard.artifacts.manifest import InputRecord, Manifest, read_listed_json
from trainyard.artifacts.urls import join
from trainyard.charts.numbers import is_number
from trainyard.errors import ArtifactError, ConfigError
from trainyard.tokenizers.config import of_manifest

if TYPE_CHECKING:
    from trainyard.tokenizers.base import Tokenizer

STAGE = "faiss_query"
EXAMPLES, TABLE, INDEX = "examples.json", "neighbors.json", "index.json"
"""Files of faiss_query and of faiss_add, by name: the modules that write them need numpy and
h5py."""


@dataclass(frozen=True, slots=True)
class Search:
    """What a search of this many lists finds and costs."""

    nprobe: int
    recall: float
    milliseconds: float | None
    """Of a query."""
    bytes: float | None
    """Of the vectors that a query is compared with."""
    is_default: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A chunk as text."""

    title: str
    source: str
    text: str
    continuation: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """A chunk of a sample and its nearest neighbours."""

    chunk: Passage
    neighbors: tuple[Passage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval:
    """The section of the card."""

    table: Mapping[str, Any]
    """neighbors.json."""
    metrics: Mapping[str, Any]
    """Of faiss_query."""
    index: Mapping[str, Any]
    """index.json; empty where the index is another one by now."""
    searches: tuple[Search, ...] = ()
    examples: tuple[Example, ...] = ()


def gather_retrieval(ancestry: Ancestry, key: str, url: str) -> Retrieval:
    """Read the table of neighbours with that key in the lineage.

    Raises ConfigError for another artifact, ArtifactError for a damaged one."""
    manifest = ancestry.manifests.get(key)
    if manifest is None or manifest.stage != STAGE:
        made = "without manifest.json" if manifest is None else f"made by {manifest.stage}"
        raise ConfigError(
            f"--retro-neighbors {url}: {made}, so it is no table of neighbours; give the output of "
            "faiss_query"
        )
    index, of_index = _index(ancestry, manifest)
    return Retrieval(
        table=_listed(key, manifest, TABLE),
        metrics=manifest.metrics,
        index=index,
        searches=_searches(index, of_index),
        examples=_examples(ancestry, key, manifest),
    )


def _listed(key: str, manifest: Manifest, name: str) -> dict[str, Any]:
    document = read_listed_json(join(key, name), manifest.record(name))
    if not isinstance(document, dict):
        raise ArtifactError(f"{join(key, name)}: not a JSON object; rerun the stage that wrote it")
    return document


def _made_of(ancestry: Ancestry, record: InputRecord) -> tuple[str, Manifest] | None:
    """The artifact that was the input; None if it was rebuilt or removed since."""
    key = key_of(record.urls[0])
    found = ancestry.manifests.get(key)
    return None if found is None or found.output_digest != record.digest else (key, found)


# --- recall -------------------------------------------------------------------------------------


def _index(ancestry: Ancestry, manifest: Manifest) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """index.json and the metrics of the index; both empty if it was rebuilt since."""
    found = _made_of(ancestry, manifest.inputs["index"])
    return ({}, {}) if found is None else (_listed(*found, INDEX), found[1].metrics)


def _searches(index: Mapping[str, Any], metrics: Mapping[str, Any]) -> tuple[Search, ...]:
    recall = index.get("recall")
    curve = recall.get("curve") if isinstance(recall, dict) else None
    return tuple(
        Search(
            int(one["nprobe"]),
            float(one["recall"]),
            _of_search(metrics, "milliseconds_per_query", one["nprobe"]),
            _of_search(metrics, "bytes_per_query", one["nprobe"]),
            one["nprobe"] == index.get("nprobe"),
        )
        for one in curve or ()
        if isinstance(one, dict) and is_number(one.get("nprobe")) and is_number(one.get("recall"))
    )


def _of_search(metrics: Mapping[str, Any], name: str, nprobe: int) -> float | None:
    values = metrics.get(name)
    found = values.get(str(nprobe)) if isinstance(values, dict) else None
    return float(found) if is_number(found) else None


# --- examples -----------------------------------------------------------------------------------


def _examples(ancestry: Ancestry, key: str, manifest: Manifest) -> tuple[Example, ...]:
    """None where faiss_query wrote none, or the database is another one by now."""
    database = _made_of(ancestry, manifest.inputs["retro_db"])
    if manifest.record(EXAMPLES) is None or database is None:
        return ()
    tokenizer = _tokenizer(*database)
    where = join(key, EXAMPLES)
    try:
        found = _listed(key, manifest, EXAMPLES)["examples"]
        return tuple(_example(one, tokenizer) for one in found)
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{where}: does not describe neighbours to show ({error!r}); run faiss_query again"
        ) from error


def _tokenizer(key: str, manifest: Manifest) -> Tokenizer:
    """The tokenizer of the token files that the database was cut from."""
    record = manifest.inputs["tokenizer"] if "tokenizer" in manifest.inputs else InputRecord((), "")
    if record.urls and inputs.resolve("tokenizer", record.urls).digest != record.digest:
        raise ArtifactError(
            f"{record.urls[0]}: not the tokenizer that {key} was made with, so chunks cannot be "
            "shown as text; put it back, or leave out --retro-neighbors"
        )
    from trainyard.tokenizers.registry import build_tokenizer  # flows read cards without it

    return build_tokenizer(of_manifest(manifest.config, record.urls, key))


def _example(found: Mapping[str, Any], tokenizer: Tokenizer) -> Example:
    neighbors = tuple(
        Passage(
            title=f"neighbour {number}, distance {float(one['distance']):.4g}",
            source=f"{one['dataset']}, document {int(one['document'])}, chunk {int(one['chunk'])}",
            text=tokenizer.decode(list(one["tokens"])),
            continuation=tokenizer.decode(list(one["continuation"])),
        )
        for number, one in enumerate(found["neighbors"], 1)
    )
    sample, place = int(found["sample"]), int(found["chunk"]) + 1
    chunk = Passage(
        title="text",
        source=f"sample {sample}, chunk {place} of it",
        text=tokenizer.decode(list(found["tokens"])),
    )
    return Example(chunk, neighbors)
