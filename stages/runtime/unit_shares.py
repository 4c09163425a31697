"""Shares of a stage from documents to files: what each records, and how a join finds its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stages.runtime.context import StageRun
from stages.runtime.document_units import KINDS, U, UnitDone, UnitFile, run_each
from stages.runtime.finished_files import copy_file
from stages.runtime.joined_shares import share_manifests
from stages.runtime.share_digests import write_blocks
from trainyard.artifacts.block_digest import num_blocks
from trainyard.artifacts.manifest import Manifest, read_listed_json
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import basename, parent
from trainyard.collection.tally import Tally
from trainyard.errors import ArtifactError


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
    """Copy the files of all units from the shares to the output; returns the shares' manifests."""
    manifests = share_manifests(stage, shares, program)
    files = [
        (share, record)
        for share, manifest in zip(shares, manifests, strict=True)
        for record in manifest.files
        if record.path.startswith(KINDS)
    ]
    size = sum(record.size_bytes for _, record in files)
    with stage.progress(size, "bytes", "join") as progress:
        for share, record in files:
            copy_file(stage, share.file_url(record.path), record.path, record, progress.update)
    return manifests


def files_of_shares(
    stage: StageRun, shares: Sequence[Output], program: str, names: Sequence[str]
) -> list[UnitFile]:
    """The files of units that shares hold, in the order of `names`."""
    manifests = share_manifests(stage, shares, program)
    files = {
        record.path: UnitFile(share.file_url(record.path), record)
        for share, manifest in zip(shares, manifests, strict=True)
        for record in manifest.files
    }
    missing = [name for name in names if name not in files]
    if missing:
        raise ArtifactError(
            f"{parent(shares[0].url)}: no share has {missing[0]}; remove them and make them again"
        )
    return [files[name] for name in names]


def read_tally(url: str, manifest: Manifest) -> Tally:
    """The report of a share with this manifest."""
    try:
        return Tally.parse(read_listed_json(url, manifest.record(basename(url))))
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(f"{url}: not the report of a share ({error}); make it again") from error
