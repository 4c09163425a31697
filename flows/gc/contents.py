"""Lists the contents of a yard's store: files, artifacts and claims."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from flows.gc.policy import HOUR, Policy
from trainyard import json_text
from trainyard.artifacts import conditional, store
from trainyard.artifacts.claim import Holder, acquire
from trainyard.artifacts.leftovers import ListedFile, entries
from trainyard.artifacts.manifest import Manifest, parse, read_manifest, read_slot
from trainyard.artifacts.output import CLAIM, MANIFEST, WORK
from trainyard.artifacts.urls import basename, join
from trainyard.errors import ArtifactError, ClaimHeldError

OF_OTHERS = (".runs", ".prefect", ".digests")
"""Folders of a yard without artifacts."""

DOTTED = f".{MANIFEST}"

AFTER_SLASH = chr(ord("/") + 1)

THREADS = 16


@dataclass(frozen=True, slots=True)
class Artifact:
    """The files of a manifest, or of a mark: the record of a manifest that is being replaced."""

    base: str
    """Prefix of the names of its files, relative to the root: `a/b/` or `a/prefix`."""
    manifest_name: str
    manifest: Manifest | None
    """None for a mark, and for a manifest that cannot be read."""
    files: tuple[str, ...]
    """Relative to the root."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claim in the store."""

    base: str
    """Prefix of all names that are claimed."""
    entry: ListedFile
    is_live: bool


@dataclass
class Contents:
    """Everything in the root, listed once."""

    root: str
    entries: Sequence[ListedFile]
    artifacts: Sequence[Artifact]
    claims: Sequence[Claimed]
    sizes: dict[str, int] = field(init=False)
    _ages: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = {entry.name: entry.size_bytes for entry in self.entries}
        self._ages = {entry.name: entry.age_seconds for entry in self.entries}

    def url(self, name: str) -> str:
        """The URL of a file."""
        return join(self.root, name)

    def size(self, names: Iterable[str]) -> int:
        """Total bytes of files."""
        return sum(self.sizes.get(name, 0) for name in names)

    def is_at_work(self, name: str) -> bool:
        """Whether a living run may be writing this file."""
        return any(name[:length] in self._live for length in self._live_lengths)

    def has_work_in(self, folder: str) -> bool:
        """Whether a living run may be writing in this folder."""
        inside = any(base.startswith(folder + "/") for base in self._live)
        return inside or self.is_at_work(folder + "/")

    def age(self, name: str) -> float:
        """Seconds since a file was written."""
        return self._ages[name]

    def below(self, folder: str) -> list[ListedFile]:
        """The files in a folder and its subfolders."""
        begin, end = (bisect_left(self._names, folder + after) for after in ("/", AFTER_SLASH))
        return self._sorted[begin:end]

    @cached_property
    def artifact_of(self) -> dict[str, Artifact]:
        """Artifacts by the names of their manifests."""
        return {artifact.manifest_name: artifact for artifact in self.artifacts}

    @cached_property
    def _sorted(self) -> list[ListedFile]:
        return sorted(self.entries, key=lambda entry: entry.name)

    @cached_property
    def _names(self) -> list[str]:
        return [entry.name for entry in self._sorted]

    @cached_property
    def _live(self) -> frozenset[str]:
        return frozenset(claim.base for claim in self.claims if claim.is_live)

    @cached_property
    def _live_lengths(self) -> list[int]:
        return sorted(set(map(len, self._live)))


def look(root: str, policy: Policy) -> Contents:
    """List the root, and read every manifest and claim in it."""
    found = [entry for entry in entries(root) if not set(OF_OTHERS) & set(entry.name.split("/"))]
    named = {entry.name: entry for entry in found}
    ours = [name for name in named if not any(part.endswith(WORK) for part in name.split("/"))]
    manifests = [name for name in ours if basename(name) == MANIFEST or name.endswith(DOTTED)]
    claims = [name for name in ours if name.endswith(f".{CLAIM}")]
    names = sorted(named)
    with ThreadPoolExecutor(THREADS) as threads:
        artifacts = threads.map(lambda name: _artifact(root, name, names), manifests)
        looked_at = threads.map(lambda name: _claim(root, named[name], policy), claims)
        there = [artifact for artifact in artifacts if artifact is not None]
        return Contents(root, found, there, [claim for claim in looked_at if claim is not None])


def _artifact(root: str, name: str, every: Sequence[str]) -> Artifact | None:
    """every: all names in the root, sorted, for those of the parts."""
    url = join(root, name)
    found = conditional.read_version(url)
    if found is None:
        return None
    is_prefix = basename(name) != MANIFEST
    base = name.removesuffix(DOTTED) if is_prefix else name.removesuffix(MANIFEST)
    try:
        manifest = parse(found[0], url)
    except ArtifactError:  # perhaps another program's: leave its files alone
        return Artifact(base, name, None, ())
    if manifest is not None:
        files, parts = [f.path for f in manifest.files], [p.path for p in manifest.parts]
    else:
        slot = read_slot(url)
        files, parts = (list(slot.files), list(slot.parts)) if slot else ([], [])
    inside = (name for part in parts for name in _below(every, base + part))
    return Artifact(base, name, manifest, (*(base + path for path in files), *inside))


def _below(names: Sequence[str], folder: str) -> Sequence[str]:
    """Those of sorted names that are in a folder and its subfolders."""
    begin, end = (bisect_left(names, folder + after) for after in ("/", AFTER_SLASH))
    return names[begin:end]


def _claim(root: str, entry: ListedFile, policy: Policy) -> Claimed | None:
    found = conditional.read_version(join(root, entry.name))
    if found is None:
        return None
    base = entry.name.removesuffix(f".{CLAIM}")
    holder = holder_of(found[0])
    is_gone = holder is not None and holder.is_gone()
    is_live = not is_gone and entry.age_seconds < policy.claim_hours * HOUR
    return Claimed(base, entry, is_live)


def holder_of(data: bytes) -> Holder | None:
    """The holder of a claim; None if it is not a claim of ours."""
    try:
        return Holder(**json_text.loads(data))
    except (ValueError, TypeError):
        return None


@contextmanager
def holding(contents: Contents, base: str) -> Iterator[None]:
    """Hold the claim on an output.

    Raises ClaimHeldError if a run holds it, or has published since the store was listed."""
    claim = acquire(contents.url(f"{base}.{CLAIM}"), 0)
    try:
        name = f"{base}{MANIFEST}" if base.endswith("/") else f"{base}{DOTTED}"
        found = contents.artifact_of.get(name)
        was_whole = found is not None and found.manifest is not None
        if not was_whole and read_manifest(contents.url(name)) is not None:
            raise ClaimHeldError(
                f"{contents.url(name)}: published in the meantime; the next sweep checks it"
            )
        yield
    finally:
        claim.release()


def remove_files(contents: Contents, names: Iterable[str]) -> None:
    """Remove files, in any order."""
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda name: store.delete(contents.url(name)), list(names)))
