"""Blocks of chunks: who makes which, and what is known once they are made.

Blocks go round to shares, and those of a share to ranks. A rank writes its blocks into the output
itself. A finished block is a unit in the work folder, which all ranks of a run share: rank 0 begins
the output, waits for the units of all ranks, and lists their files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stages.retro_embed.config import RetroEmbedConfig
from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_manifest
from trainyard.artifacts.store import FileRecord
from trainyard.parallel.launcher import rank_of_environment
from trainyard.retrieval.vectors import block_name

BEGUN = "begun"
"""Unit of rank 0: from then on final files may change."""

ENDING = ".unit.json"

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Block:
    """The chunks `start` up to `end`."""

    start: int
    end: int
    name: str
    """Of its file in the output."""

    @property
    def key(self) -> str:
        """Its name in the work folder."""
        return f"{self.start:015d}"

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the run."""

    rank: int
    count: int
    local_rank: int
    local_count: int

    @staticmethod
    def of_environment() -> Ranks:
        """As the launcher set them; one process alone without a launcher."""
        return Ranks(*rank_of_environment()) if "RANK" in os.environ else Ranks(0, 1, 0, 1)


def plan_blocks(count: int, size: int) -> list[Block]:
    """All blocks of an output."""
    starts = range(0, count, size)
    ends = (min(start + size, count) for start in starts)
    return [
        Block(start, end, block_name(start, end, count))
        for start, end in zip(starts, ends, strict=True)
    ]


def of_share(config: RetroEmbedConfig, blocks: Sequence[Block]) -> Sequence[Block]:
    """All blocks, or those of a share."""
    return blocks if config.rank is None else blocks[config.rank :: config.world_size]


def begin(stage: StageRun, ranks: Ranks, blocks: Iterable[Block]) -> bool:
    """Return when final files may be written; False if there is nothing left to write.

    A rank that comes late may find that killed runs had finished its blocks, and that rank 0 has
    published the output and removed the units that said so."""
    if ranks.rank == 0:
        stage.begin_files(block.name for block in blocks)
        stage.work.publish(BEGUN, {})
        return True
    while BEGUN + ENDING not in stage.work.names():
        if _is_published(stage):
            return False
        time.sleep(POLL_SECONDS)
    return True


def _is_published(stage: StageRun) -> bool:
    """Whether there is another manifest than at the start of the run."""
    assert stage.output is not None
    found = read_manifest(stage.output.manifest_url)
    return found is not None and (stage.slot is None or found[1] != stage.slot.version)


def wait_for(stage: StageRun, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """List the files of these blocks, once other ranks have made them; returns their facts."""
    left = {block.key + ENDING for block in blocks}
    while left - stage.work.names():
        time.sleep(POLL_SECONDS)
    return [_list_file(stage, block) for block in blocks]


def _list_file(stage: StageRun, block: Block) -> dict[str, Any]:
    """Waits for a rank that found the file of a killed run damaged, and makes it again."""
    assert stage.output is not None
    url = stage.output.file_url(block.name)
    while True:
        unit = store.read_json(stage.work.url(block.key + ENDING))
        record = FileRecord(**unit["file"])
        if store.exists(url) and store.info(url).size_bytes == record.size_bytes:
            stage.record(record)
            facts: dict[str, Any] = unit["facts"]
            return facts
        time.sleep(POLL_SECONDS)
