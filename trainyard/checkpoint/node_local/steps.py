"""Steps in node-local folders, each with a part of every step.

    FOLDER/iter_0000050/   as any step, but with only the tensor files that ranks of this node
                           wrote; documents and manifest.json are complete on every node

A folder has its manifest once its own part is complete. A step is complete if every file of its
manifest is in one of the folders; on one node, it is a step like any other."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from trainyard.artifacts import conditional, store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.inputs import read_digest
from trainyard.artifacts.manifest import Manifest, read_listed, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import join
from trainyard.checkpoint.node_local.visibility import Ranges, Visibility, ranges_of
from trainyard.checkpoint.ranks import Ranks
from trainyard.checkpoint.sight import Sight
from trainyard.checkpoint.steps import remove_step, step_folder, step_of
from trainyard.checkpoint.stored_step import Verify
from trainyard.errors import ArtifactError

log = logging.getLogger(__name__)

TENSORS = ".safetensors"
"""Suffix of the files that are on one node only."""


@dataclass(frozen=True, slots=True)
class PartialStep:
    """The part of a step in one folder."""

    step: int
    digest: str
    """Digest of the whole step, equal for all parts of one save."""
    held: Ranges
    """The tensor files in this folder, as ranges of `tensor_files`: few, as those of a node have
    consecutive numbers."""
    lost: tuple[str, ...] = ()
    """Documents of the step that are not in this folder."""
    faults: tuple[str, ...] = ()
    """Messages about files that differ from the published ones; they count as missing."""


@dataclass(frozen=True, slots=True)
class LocalStep:
    """A step that is complete over all folders."""

    step: int
    digest: str
    sight: Sight | None
    """Which ranks see which files; None if every rank sees all."""


def tensor_files(manifest: Manifest) -> list[str]:
    """The tensor files of a step, sorted."""
    return sorted(record.path for record in manifest.files if record.path.endswith(TENSORS))


def partial_steps(root_url: str, lineage: str) -> list[PartialStep]:
    """The steps of a run with a manifest in one folder, ascending."""
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for path, size in store.list_files(root_url).items():
        folder, _, name = path.partition("/")
        if step_of(folder) is not None:
            sizes[folder][name] = size
    found = (_held(join(root_url, folder), sizes[folder], lineage) for folder in sorted(sizes))
    return [held for held in found if held is not None]


def _held(url: str, sizes: Mapping[str, int], lineage: str) -> PartialStep | None:
    step = step_of(store.basename(url))
    assert step is not None, url
    try:
        found = read_manifest(join(url, MANIFEST))
    except ArtifactError as error:
        log.warning("skipping %s: %s", url, error)
        return None
    if found is None or found[0].lineage != lineage:
        return None
    missing, faults = set(), []
    for record in found[0].files:
        size = sizes.get(record.path)
        if size != record.size_bytes:
            missing.add(record.path)
        if size not in (None, record.size_bytes):
            sizes_differ = f"{size} bytes, manifest.json says {record.size_bytes}"
            faults.append(f"{join(url, record.path)}: {sizes_differ}")
    names = tensor_files(found[0])
    held = ranges_of([number for number, name in enumerate(names) if name not in missing])
    lost = tuple(sorted(missing - set(names)))
    return PartialStep(step, found[0].output_digest, held, lost, tuple(faults))


def candidates(found: Sequence[Sequence[PartialStep]]) -> list[tuple[int, str]]:
    """(step, digest) of every save with a part in some folder. The highest step comes first; of two
    saves of one step, the one in more folders."""
    counts: dict[tuple[int, str], int] = defaultdict(int)
    for steps in found:
        for held in steps:
            counts[held.step, held.digest] += 1
    return sorted(counts, key=lambda save: (-save[0], -counts[save], save[1]))


class LocalSteps:
    """The node-local folders of a run; all ranks call every method together."""

    def __init__(self, root_url: str, lineage: str, visibility: Visibility, ranks: Ranks) -> None:
        """root_url: this rank's folder."""
        self.root_url, self.lineage = root_url, lineage
        self.visibility, self._ranks = visibility, ranks

    def find(
        self, least: int, verify: Verify, refused: Callable[[str], str | None]
    ) -> LocalStep | None:
        """The highest complete step from `least` on; logs each step above it with a reason.

        refused: why a run cannot resume from the step at a URL, or None; called on one rank."""
        first = self.visibility.is_first
        found = self._ranks.gather(
            lambda: partial_steps(self.root_url, self.lineage) if first else []
        )
        for step, digest in candidates(found):
            if step < least:
                break
            parts = {
                rank: held
                for rank, steps in enumerate(found)
                for held in steps
                if (held.step, held.digest) == (step, digest)
            }
            asked = min(parts)
            url = join(self.root_url, step_folder(step))
            names = self._ranks.share(partial(_tensor_files_of, url), asked)
            holders = holders_of(names, parts)
            reason = next(self._reasons(url, parts, holders, verify, refused), None)
            if reason is None:
                self._add_documents(url, parts)
                return LocalStep(step, digest, self._sight(holders))
            if self._ranks.rank == 0:
                log.warning(
                    "skipping step %d in %s (%s): %s",
                    *(step, self.root_url, self.visibility.description, reason),
                )
        return None

    def _reasons(
        self,
        url: str,
        parts: Mapping[int, PartialStep],
        holders: Mapping[str, Sequence[int]],
        verify: Verify,
        refused: Callable[[str], str | None],
    ) -> Iterator[str]:
        faults = [fault for rank in sorted(parts) for fault in parts[rank].faults]
        gone = [name for name, folders in holders.items() if not folders]
        lost = [f"{name} is missing" for rank in sorted(parts) for name in parts[rank].lost]
        if faults and (gone or lost):
            yield f"damaged: {faults[0]}" + _more(len(faults))
        if gone:
            folders = len(self.visibility.firsts)
            yield (
                f"{gone[0]}{_more(len(gone))} is in none of the {folders} folders: a node was "
                f"replaced, or its folder was emptied ({len(parts)} of them have the step)"
            )
        if lost:
            yield f"damaged: {lost[0]}" + _more(len(lost))
        asked = min(parts)
        reasons = self._ranks.gather(lambda: refused(url) if self._ranks.rank == asked else None)
        reason = reasons[asked]
        if reason is not None:
            yield reason
        if verify == "digests":
            wrong = self._ranks.gather(lambda: self._wrong_digests(url, parts))
            yield from (f"damaged: {text}" for texts in wrong for text in texts)

    def _wrong_digests(self, url: str, parts: Mapping[int, PartialStep]) -> list[str]:
        """Wrong digests in this rank's share of the files in its folder."""
        first = self.visibility.of_rank[self.visibility.rank]
        found = read_manifest(join(url, MANIFEST)) if first in parts else None
        if found is None:
            return []
        mates = self.visibility.ranks(first)
        names, part = tensor_files(found[0]), parts[first]
        missing = {*names, *part.lost}.difference(*(names[begin:end] for begin, end in part.held))
        here = [record for record in found[0].files if record.path not in missing]
        wrong = []
        for record in here[mates.index(self.visibility.rank) :: len(mates)]:
            digest = read_digest(join(url, record.path))
            if digest != record.digest:
                digests = f"digest {digest}, manifest.json says {record.digest}"
                wrong.append(f"{join(url, record.path)}: {digests}")
        return wrong

    def _add_documents(self, url: str, parts: Mapping[int, PartialStep]) -> None:
        """Copy the documents to every folder that lacks them, such as that of a new node."""
        if set(parts) == set(self.visibility.firsts):
            return
        documents = self._ranks.share(lambda: read_documents(url), min(parts))
        lacks = self.visibility.is_first and self._ranks.rank not in parts
        self._ranks.gather(lambda: write_documents(url, documents) if lacks else None)

    def _sight(self, holders: Mapping[str, Sequence[int]]) -> Sight | None:
        everywhere = len(self.visibility.firsts)
        if all(len(folders) == everywhere for folders in holders.values()):
            return None
        return Sight(self.visibility.of_rank, holders)

    def remove(self) -> None:
        """Remove all folders, after the end of the run."""
        if self.visibility.is_first:
            store.delete_tree(self.root_url)


def holders_of(names: Sequence[str], parts: Mapping[int, PartialStep]) -> dict[str, list[int]]:
    """The folders of each tensor file, ascending."""
    holders: dict[str, list[int]] = {name: [] for name in names}
    for rank in sorted(parts):
        for begin, end in parts[rank].held:
            for name in names[begin:end]:
                holders[name].append(rank)
    return holders


def _manifest_of(step_url: str) -> Manifest:
    found = read_manifest(join(step_url, MANIFEST))
    assert found is not None, step_url
    return found[0]


def _tensor_files_of(step_url: str) -> list[str]:
    return tensor_files(_manifest_of(step_url))


def _more(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""


# --- the documents of every folder --------------------------------------------------------------


def read_documents(step_url: str) -> dict[str, bytes]:
    """All files of a step except tensor files, the manifest last."""
    records = {r.path: r for r in _manifest_of(step_url).files if not r.path.endswith(TENSORS)}
    read = {name: read_listed(join(step_url, name), records[name]) for name in sorted(records)}
    return {**read, MANIFEST: store.read_bytes(join(step_url, MANIFEST))}


def write_documents(step_url: str, documents: Mapping[str, bytes]) -> None:
    """Publish this folder's part of a step: the documents, then the manifest."""
    if store.exists(join(step_url, MANIFEST)):  # of another save of that step
        remove_step(store.parent(step_url), step_of(store.basename(step_url)) or 0)
    for name, data in documents.items():
        if name != MANIFEST:
            store.write_bytes(join(step_url, name), data)
    written = conditional.put_if_absent(join(step_url, MANIFEST), documents[MANIFEST])
    if written != digest_bytes(documents[MANIFEST]):
        raise ArtifactError(f"{step_url}: another run writes there; give this run its own folder")
