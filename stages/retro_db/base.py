"""A finished database, whose blocks a larger one takes over, and a block of a finished output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.retro_db.blocks import DocumentBlock
from stages.retro_db.config import RetroDbConfig
from stages.runtime.context import StageRun
from trainyard.artifacts import inputs
from trainyard.artifacts.manifest import check_digest
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import join
from trainyard.config import digest_relevant, flag
from trainyard.errors import ArtifactError, ConfigError
from trainyard.retrieval.chunks import Block
from trainyard.retrieval.database_sources import database_manifest, find_datasets
from trainyard.retrieval.dataset_infos import read_infos
from trainyard.retrieval.hdf5 import block_name, read_block

MAY_DIFFER = ("retro_index_ntrain", "retro_sample_mode", "retro_sample_seed")
"""Options of the sample, which is drawn again."""


@dataclass(frozen=True, slots=True)
class Base:
    """The database and the names of its datasets."""

    url: str
    names: list[str]
    records: Mapping[str, FileRecord]

    def read(self, block: DocumentBlock, name: str, num_documents: int, scratch: Path) -> Block:
        """A block."""
        file = block_name(name, block.first, block.last, num_documents)
        return read_listed_block(self.url, file, self.records.get(file), scratch)


def read_listed_block(folder: str, name: str, record: FileRecord | None, scratch: Path) -> Block:
    """A block of a finished output. Raises ArtifactError for one that is not what its manifest
    lists."""
    if record is None:
        raise ArtifactError(f"{folder}: its manifest does not list {name}; build it again")
    url = join(folder, name)
    check_digest(url, record, inputs.read_digest(url))
    path = inputs.fetch(url, scratch)
    held = read_block(path, url)
    if path.parent == scratch:
        path.unlink()
    return held


def open_base(config: RetroDbConfig, stage: StageRun, prefixes: Sequence[str]) -> Base:
    """Raises ConfigError for a database of other options, or of other datasets than the first."""
    assert config.retro_base_db is not None
    url = config.retro_base_db
    manifest = database_manifest(url)
    if manifest is None:
        raise ConfigError(f"--retro-base-db {url}: no manifest.json, so no finished database")
    mine = {k: v for k, v in digest_relevant(config).items() if k not in MAY_DIFFER}
    for key, value in mine.items():
        if manifest.config.get(key) != value:
            raise ConfigError(
                f"{flag(key)} {value!r}: --retro-base-db {url} was made with "
                f"{manifest.config.get(key)!r}; give that, or build without a base"
            )
    for name in ("tokenizer", "bert"):
        before, now = manifest.inputs.get(name), stage.inputs.get(name)
        if (before and before.digest) != (now and now.digest):
            raise ConfigError(
                f"--retro-base-db {url} was made with another {name}; give that, or build without "
                "a base"
            )
    names = [info.prefix for info in read_infos(url)]
    first = list(prefixes)[: len(names)]
    if find_datasets(url, first) != [(number, number) for number in range(len(names))]:
        raise ConfigError(
            f"--retro-base-db {url} has the datasets {', '.join(names)}, and --data-path does not "
            "begin with the token files of these; name them first, unchanged and in that order"
        )
    return Base(url, names, inputs.read_folder(url))
