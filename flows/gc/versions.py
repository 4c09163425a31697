"""What corpora and indices that grow have in common: a pointer to the newest version, old units,
and their removal under the lock of the recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flows.gc.contents import Artifact, Contents, holding, remove_files
from flows.gc.policy import Garbage
from flows.gc.references import Collectable
from flows.recipes.corpus_versions import CURRENT
from flows.runner.run_lock import LOCK_FILE
from trainyard.artifacts import store
from trainyard.artifacts.claim import acquire
from trainyard.artifacts.manifest import read_slot, retire
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileInfo
from trainyard.artifacts.urls import join
from trainyard.errors import ClaimHeldError

VERSION_FILE = "version.json"
BY = "gc"
"""Name of this program in the mark of a manifest that it removes."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """The file current.json, which names the newest version."""

    folder: str
    """Folder that it is in, relative to the yard's root."""
    info: FileInfo
    recipe: str
    """Root of its recipe, relative to the yard's root: a flow at work there holds a lock."""

    @property
    def name(self) -> str:
        """Its name, relative to the yard's root."""
        return join(self.folder, CURRENT)


def unit_of(contents: Contents, artifact: Artifact) -> Collectable:
    """One artifact, its manifest last."""
    names = (*(n for n in artifact.files if n in contents.sizes), artifact.manifest_name)
    return Collectable(artifact.base.rstrip("/"), names, (artifact,))


@dataclass(frozen=True, slots=True)
class Old:
    """A unit to remove if nothing uses it."""

    kind: str
    unit: Collectable
    why: str
    pointer: Pointer

    def garbage(self, contents: Contents) -> Garbage:
        """It, as what a sweep reports and removes."""
        remove = partial(_remove, contents, self.unit)
        return Garbage(
            kind=self.kind,
            url=contents.url(self.unit.place),
            size_bytes=contents.size(self.unit.names),
            why=self.why,
            remove=partial(_remove_locked, contents, self.pointer, remove),
        )


def number_of(version: str) -> int:
    """The number that the name of a version begins with; 0 if it has none."""
    head = version.partition("-")[0]
    return int(head) if head.isdecimal() else 0


def _remove_locked(contents: Contents, pointer: Pointer, remove: Callable[[], None]) -> None:
    """Remove under the run lock of the recipe, since a flow may be about to reuse a part.

    Raises ClaimHeldError if a flow works on it."""
    claim = acquire(join(contents.root, pointer.recipe, LOCK_FILE), 0)
    try:
        # Not read again: it names each source, and there may be as many removals.
        url = contents.url(pointer.name)
        if not store.exists(url) or store.info(url) != pointer.info:
            raise ClaimHeldError(
                f"{pointer.folder}: it has a new version; the next sweep checks it"
            )
        remove()
    finally:
        claim.release()


def _remove(contents: Contents, unit: Collectable) -> None:
    """Invalidate manifests first and remove them last, so that a sweep after a kill can finish.
    The document of a version is removed last of all."""
    for artifact in unit.artifacts:
        url = contents.url(artifact.manifest_name)
        with holding(contents, artifact.base):
            slot = read_slot(url)
            if slot is not None:
                retire(url, slot, BY)
            remove_files(contents, artifact.files)
    last = (MANIFEST, f"/{VERSION_FILE}")
    remove_files(contents, [name for name in unit.names if not name.endswith(last)])
    remove_files(contents, [name for name in unit.names if name.endswith(MANIFEST)])
    for name in unit.names:
        if name.endswith(VERSION_FILE):
            store.delete(contents.url(name))
