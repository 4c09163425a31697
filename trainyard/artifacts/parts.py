"""Artifacts in parts: folders with manifests of their own, which the manifest above them names.

A run of ten thousand ranks has thousands of files a step. Its manifest names the steps, so that a
reader of the run parses a line a step, and only who needs the files of a step reads its manifest.
Runs of earlier versions list all files in one manifest; both kinds read the same here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, ManifestSlot, PartRecord, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError


def part_manifest(folder_url: str, part: PartRecord) -> Manifest:
    """The manifest of a part of the artifact in a folder.

    Raises ArtifactError if it is missing, or differs from what the artifact says."""
    url = join(folder_url, part.path, MANIFEST)
    found = read_manifest(url)
    if found is None:
        raise ArtifactError(f"{url}: missing, and the manifest of {folder_url} names this folder")
    if found[0].output_digest != part.output_digest:
        raise ArtifactError(
            f"{url}: output digest {found[0].output_digest}, the manifest of {folder_url} says "
            f"{part.output_digest}; the folder was replaced since"
        )
    return found[0]


def files_of_part(folder_url: str, part: PartRecord) -> Iterator[FileRecord]:
    """The files of a part, relative to the artifact in the folder.

    Raises ArtifactError as `part_manifest` does."""
    for record in part_manifest(folder_url, part).files:
        yield replace(record, path=f"{part.path}/{record.path}")


def wrong_file(folder_url: str, manifest: Manifest, sizes: Mapping[str, int]) -> str | None:
    """The first file of an artifact that is missing or has another size; None if there is none.

    sizes: of all files in the folder. The manifest of a part is read only if the files of the part
    differ in number or in size from what they were together."""
    for record in manifest.files:
        if sizes.get(record.path) != record.size_bytes:
            return record.path
    found = _by_folder(sizes, (part.path for part in manifest.parts))
    for part in manifest.parts:
        own = f"{part.path}/{MANIFEST}"
        if own not in sizes:
            return own
        there = found[part.path]
        if (len(there) - 1, sum(there.values()) - sizes[own]) == (part.num_files, part.size_bytes):
            continue
        for record in part_manifest(folder_url, part).files:
            if there.get(record.path) != record.size_bytes:
                return f"{part.path}/{record.path}"
    return None


def _by_folder(sizes: Mapping[str, int], folders: Iterable[str]) -> dict[str, dict[str, int]]:
    """The sizes of the files in each of some folders at the top, by their names in it."""
    found: dict[str, dict[str, int]] = {folder: {} for folder in folders}
    for name, size in sizes.items():
        folder, _, rest = name.partition("/")
        if rest and folder in found:
            found[folder][rest] = size
    return found


def remove_others(folder_url: str, slot: ManifestSlot, manifest: Manifest) -> None:
    """Remove the parts that the replaced manifest named and this one does not hold."""
    for path in slot.parts:
        if not manifest.holds(path):
            store.delete(join(folder_url, path, MANIFEST))  # first: without it the part is gone
            store.delete_tree(join(folder_url, path))
