"""The datasets of a chunk database: `indexed_dataset_infos.json`, as Megatron-LM writes it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.inputs import read_checked_json
from trainyard.errors import ArtifactError

INFOS = "indexed_dataset_infos.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """One dataset of a chunk database, under Megatron-LM's keys."""

    ratio: float
    """Its weight, relative to the others."""
    prefix: str
    """Its name: the folder of its blocks is individual/PREFIX."""
    n_docs: int
    n_docs_train: int
    """The first documents are for training; the rest are validation and test documents."""
    n_chunks: int
    """Chunks with at least one BERT token."""
    n_chunks_train: int
    """Of these, the ones in training documents."""
    n_chunks_invalid: int
    """Chunks without a BERT token, which are in no merged database."""
    n_chunks_sampled: int
    """Training chunks that train the index."""


def read_infos(folder_url: str) -> list[DatasetInfo]:
    """The datasets of the chunk database in a folder, in the order of their numbers."""
    url = store.join(folder_url, INFOS)
    if not store.exists(url):
        raise ArtifactError(f"{url} is missing: not a chunk database, or not a finished one")
    document: Any = read_checked_json(url)
    names = {field.name for field in fields(DatasetInfo)}
    if not isinstance(document, list) or not all(
        isinstance(entry, dict) and entry.keys() == names for entry in document
    ):
        raise ArtifactError(
            f"{url}: not a list of datasets with the keys {', '.join(sorted(names))}"
        )
    infos = [DatasetInfo(**entry) for entry in document]
    for entry, info in zip(document, infos, strict=True):
        counts = [value for name, value in entry.items() if name.startswith("n_")]
        if (
            type(info.prefix) is not str
            or type(info.ratio) not in (int, float)
            or not 0 <= info.ratio < float("inf")
            or any(type(count) is not int or not 0 <= count < 2**63 for count in counts)
        ):
            raise ArtifactError(
                f"{url}: a dataset has a prefix that is no text, or a ratio or count that is no "
                f"number from 0 on: {entry!r:.300}"
            )
    return infos


def num_sampled(num_chunks: int, ratio: float, sum_of_ratios: float) -> int:
    """The share of a dataset in `--retro-index-ntrain`, by Megatron-LM's rounding."""
    return int(num_chunks * ratio / sum_of_ratios)
