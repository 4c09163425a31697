"""Finds the manifests at a URL, re-reads their files, and lists every difference."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from stages.runtime.context import StageRun
from stages.verify.config import VerifyConfig
from trainyard.artifacts import store
from trainyard.artifacts.inputs import read_digest
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.artifacts.output import MANIFEST, PARTS
from trainyard.artifacts.parts import files_of_part
from trainyard.artifacts.parts_list import read_parts
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import basename, join
from trainyard.errors import ArtifactError

log = logging.getLogger(__name__)


def run(config: VerifyConfig, stage: StageRun) -> dict[str, Any]:
    """Verify every artifact; raises ArtifactError after all of them were read, if any differs."""
    manifests = [found for url in config.url for found in find_manifests(url)]
    total = sum(manifest.size_bytes for _, manifest in manifests)
    faults: list[str] = []
    seen: set[str] = set()
    with stage.progress(total, "bytes", "verify") as progress:
        for base, manifest in manifests:
            for record in _files(base, manifest, faults):
                fault = compare(base + record.path, record)
                faults += [fault] if fault else []
                progress.update(record.size_bytes)
                if record.path.endswith(PARTS) and not fault:
                    faults += _differing_parts(base + record.path, seen)
    files = sum(manifest.num_files for _, manifest in manifests)
    if faults:
        raise ArtifactError(f"{len(faults)} of {files} files differ:\n  " + "\n  ".join(faults))
    what = f"{files:,} files, {total:,} bytes, in {len(manifests):,} artifacts"
    print(f"verified {what}: all as published")
    return {}


def _files(base: str, manifest: Manifest, faults: list[str]) -> Iterator[FileRecord]:
    """The files of an artifact and of its parts; a part whose manifest differs is a fault."""
    yield from manifest.files
    for part in manifest.parts:
        try:
            yield from files_of_part(base, part)
        except ArtifactError as error:
            faults.append(str(error))


def _differing_parts(url: str, seen: set[str]) -> Iterator[str]:
    """The differences of the pairs that a virtual dataset names; each file is read once."""
    for part in read_parts(url).parts:
        for ending, digest in ((".bin", part.bin_digest), (".idx", part.idx_digest)):
            file = part.prefix + ending
            if file + digest not in seen:
                seen.add(file + digest)
                if not store.exists(file):
                    yield f"{file}: missing; a part of {url}"
                elif (found := read_digest(file)) != digest:
                    yield f"{file}: expected digest {digest}, found {found}; a part of {url}"


def find_manifests(url: str) -> list[tuple[str, Manifest]]:
    """(base URL, manifest) of the artifacts at or below a URL; a file is at base URL + its path.

    Raises ArtifactError when there is none."""
    at = url.rstrip("/")
    for manifest_url in (f"{at}.{MANIFEST}", join(at, MANIFEST)):
        found = read_manifest(manifest_url)
        if found is not None:
            return [(_base(manifest_url), found[0])]
    below = []
    for name in store.list_files(at):
        if basename(name) == MANIFEST or name.endswith("." + MANIFEST):
            found = read_manifest(join(at, name))
            if found is not None:
                below.append((_base(join(at, name)), found[0]))
            else:
                log.warning(
                    "%s: a run was replacing this artifact and has not finished", join(at, name)
                )
    if not below:
        raise ArtifactError(
            f"{url}: no manifest here or below, so no finished artifact; check the path"
        )
    return below


def _base(manifest_url: str) -> str:
    if basename(manifest_url) == MANIFEST:
        return manifest_url.removesuffix(MANIFEST)
    return manifest_url.removesuffix("." + MANIFEST)


def compare(url: str, record: FileRecord) -> str | None:
    """The difference of one file from its record; None if there is none."""
    try:
        found = read_digest(url)
    except ArtifactError:
        return f"{url}: missing (expected {record.size_bytes:,} bytes, digest {record.digest})"
    if found == record.digest:
        return None
    return f"{url}: expected digest {record.digest}, found {found}"
