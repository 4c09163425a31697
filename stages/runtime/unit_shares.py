"""Shares of a stage from documents to files: what each records, and how a join finds its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from stages.runtime.context import StageRun
from stages.runtime.document_units import (
    BAD,
    DROPPED,
    KINDS,
    U,
    UnitDone,
    UnitFile,
    pieces_of,
    run_each,
)
from stages.runtime.finished_files import copy_files
from stages.runtime.joined_shares import share_manifests
from stages.runtime.share_digests import write_blocks
from trainyard.artifacts.block_digest import num_blocks
from trainyard.artifacts.manifest import Manifest, read_listed_json
from trainyard.artifacts.output import Output
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import basename, parent
from trainyard.collection.tally import Tally
from trainyard.errors import ArtifactError

FILE_OF_UNIT = re.compile(rf"({'|'.join((*KINDS, BAD))})-([0-9]+)(?:-([0-9]+))?\.jsonl")
"""Kind, unit and piece, of a name that `UnitJob.name` gives."""


def run_share(
    stage: StageRun,
    jobs: Sequence[U],
    work: Callable[[U], UnitDone],
    num_workers: int | None,
    what: str,
    final_names: Callable[[U], Sequence[str]] | None = None,
    side_by_side: bool = False,
) -> list[dict[str, Any]]:
    """As `run_units`, for a share; it also records what it read of the input."""
    done = run_each(stage, jobs, work, num_workers, what, final_names, side_by_side)
    digests: dict[str, dict[int, str]] = {}
    for job, one in zip(jobs, done, strict=True):
        for source, found in zip(job.unit.sources, one.digests, strict=True):
            first = num_blocks(source.start)
            digests.setdefault(source.url, {}).update(enumerate(found, first))
    write_blocks(stage, {url: one for job in jobs for url, one in job.digested.items()}, digests)
    return [one.facts for one in done]


def join_units(stage: StageRun, shares: Sequence[Output], program: str) -> list[Manifest]:
    """Copy the files of all units from the shares to the output, those of pieces end to end;
    returns the shares' manifests."""
    manifests = share_manifests(stage, shares, program)
    parts: dict[str, list[tuple[tuple[bool, str], str, FileRecord]]] = {}
    for share, manifest in zip(shares, manifests, strict=True):
        for record in manifest.files:
            if found := FILE_OF_UNIT.fullmatch(record.path):
                kind, unit, piece = found.groups("")
                name = f"{DROPPED if kind == BAD else kind}-{unit}.jsonl"
                place = (kind == BAD, piece)
                parts.setdefault(name, []).append((place, share.file_url(record.path), record))
    size = sum(record.size_bytes for part in parts.values() for _, _, record in part)
    with stage.progress(size, "bytes", "join") as progress:
        for name, found_parts in sorted(parts.items()):
            files = [(url, record) for _, url, record in sorted(found_parts)]
            copy_files(stage, files, name, progress.update)
    return manifests


class FilesOfShares:
    """The files that all shares hold, for another pass."""

    def __init__(self, stage: StageRun, shares: Sequence[Output], program: str) -> None:
        """Raises the errors of `share_manifests`."""
        self._shares = shares
        self._files = {
            record.path: UnitFile(share.file_url(record.path), record)
            for share, manifest in zip(shares, share_manifests(stage, shares, program), strict=True)
            for record in manifest.files
        }

    def named(self, name: str) -> UnitFile:
        """One of them; ArtifactError if no share has it."""
        if name not in self._files:
            raise ArtifactError(
                f"{parent(self._shares[0].url)}: no share has {name}; remove them and make them "
                "again"
            )
        return self._files[name]

    def of_pieces(self, jobs: Sequence[U], name_of: Callable[[U], str]) -> list[list[UnitFile]]:
        """Of each job, the files of its pieces."""
        pieces = pieces_of(jobs, len(self._shares))
        return [[self.named(name_of(piece)) for piece in own] for own in pieces]


def read_tally(url: str, manifest: Manifest) -> Tally:
    """The report of a share with this manifest."""
    try:
        return Tally.parse(read_listed_json(url, manifest.record(basename(url))))
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(f"{url}: not the report of a share ({error}); make it again") from error
