"""The lineage of a run: the artifacts that the manifests name, and all they were made from.

An input is looked up by its URL and compared by its digest. An artifact that was rebuilt since then
is not the origin: the run's input is shown as an earlier version, without manifest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.block_digest import MARK
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import each_of
from trainyard.artifacts.manifest import InputRecord, Manifest, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import basename, has_glob, join, local_path, parent
from trainyard.charts.numbers import TIMES

Edge = tuple[str, str]
"""(from, to), by key."""

MAX_SIZED = 64
"""An input with more raw sources than this has no sizes: each size is a request to the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A finished artifact as its manifest describes it, or a raw source without a manifest."""

    key: str
    """Unique in a lineage: its URL."""
    stage: str
    """The stage that made it; empty for a raw source."""
    digest: str
    size_bytes: int | None = None
    num_files: int = 0
    count: int = 1
    """Number of artifacts, where several are shown as one."""
    alias: str = ""
    """Name of an artifact that its stage does not identify."""
    alias_is_shared: bool = False
    """An artifact of another stage has it too."""
    seconds: float | None = None
    started: str = ""
    code: dict[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name, and the number of artifacts."""
        stage = self.stage.replace("_", " ")
        name = f"{stage} {self.alias}" if self.alias_is_shared else self.alias or stage or "source"
        return f"{name} {TIMES}{self.count}" if self.count > 1 else name

    @property
    def long_label(self) -> str:
        """The label, with the stage in front of an alias."""
        stage = self.stage.replace("_", " ")
        is_apart = stage and self.alias and not self.alias_is_shared
        return f"{stage}, {self.label}" if is_apart else self.label


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Artifacts, parents before children, and the edges between them."""

    artifacts: tuple[Artifact, ...]
    edges: tuple[Edge, ...]
    destination: str
    """Key of the checkpoint, the end of the main line."""

    @property
    def connected(self) -> tuple[Artifact, ...]:
        """The artifacts with an edge, and the checkpoint: those that a picture shows."""
        linked = {key for edge in self.edges for key in edge} | {self.destination}
        return tuple(artifact for artifact in self.artifacts if artifact.key in linked)

    def parents(self, artifact: Artifact) -> list[Artifact]:
        """The artifacts that this one was made from."""
        keys = {source for source, target in self.edges if target == artifact.key}
        return [one for one in self.artifacts if one.key in keys]


class Ancestry:
    """Finds artifacts and the edges between them by their manifests."""

    def __init__(self) -> None:
        self.artifacts: dict[str, Artifact] = {}
        self.edges: dict[Edge, None] = {}
        self.manifests: dict[str, Manifest] = {}
        self._find = lru_cache(maxsize=None)(_manifest_at)
        self._artifacts_of = lru_cache(maxsize=None)(self._look_for)
        self._seen: set[str] = set()

    def add(self, url: str) -> str:
        """Add the artifact at a URL and all its origins; returns its key."""
        self.look_ahead([url])
        for key in self._artifacts_of(url):
            self._enter(key)
            return key
        self.artifacts.setdefault(key_of(url), _source(key_of(url), ""))
        return key_of(url)

    def look_ahead(self, urls: Sequence[str]) -> None:
        """Look at artifacts that will be added and at their origins, those of a level together:
        each of ten thousand parts costs some requests."""
        wanted: dict[str, InputRecord | None] = dict.fromkeys(urls)
        while wanted := {url: one for url, one in wanted.items() if url not in self._seen}:
            self._seen.update(wanted)
            keys: dict[str, None] = {}
            for (url, record), found in zip(
                wanted.items(), each_of(self._artifacts_of, [*wanted]), strict=True
            ):
                if record is None or (found and self._is_current(url, found, record)):
                    keys |= dict.fromkeys(found)
            manifests = filter(None, map(self._find, keys))
            records = chain.from_iterable(one.inputs.values() for one in manifests)
            wanted = {url: record for record in records for url in record.urls}

    def _enter(self, key: str) -> None:
        if key in self.manifests:
            return
        manifest = self._find(key)
        assert manifest is not None, f"{key} was found to have a manifest"
        self.manifests[key] = manifest
        origins: list[str] = []
        for record in manifest.inputs.values():
            origins += self._origins(record)
        self.artifacts[key] = describe(key, manifest)  # after its origins: parents come first
        self.edges |= dict.fromkeys((origin, key) for origin in origins if origin != key)

    def _origins(self, record: InputRecord) -> list[str]:
        keys: dict[str, None] = {}
        for url in record.urls:
            found = self._artifacts_of(url)
            if found and self._is_current(url, found, record):
                for key in found:
                    self._enter(key)
                keys |= dict.fromkeys(found)
            else:
                keys[self._raw(url, record, bool(found))] = None
        return list(keys)

    def _is_current(self, url: str, found: Sequence[str], record: InputRecord) -> bool:
        """False when the artifact at a URL has another digest than the input had."""
        manifest = self._find(found[0])
        if len(record.urls) > 1 or len(found) > 1 or manifest is None:
            return True  # the digest is one of many together
        if found[0] == key_of(url):
            return manifest.output_digest == record.digest.removeprefix(MARK)
        listed = manifest.record(key_of(url).removeprefix(found[0]).lstrip("/"))
        return listed is None or listed.digest == record.digest.removeprefix(MARK)

    def _raw(self, url: str, record: InputRecord, is_earlier: bool) -> str:
        key = f"{url} @ {record.digest[:12]}" if is_earlier else url
        if key not in self.artifacts:
            sized = not is_earlier and len(record.urls) <= MAX_SIZED
            digest = record.digest if len(record.urls) == 1 else ""
            alias = f"earlier {basename(url.rstrip('/'))}" if is_earlier else ""
            self.artifacts[key] = _source(key, digest, url if sized else None, alias)
        return key

    def _look_for(self, url: str) -> tuple[str, ...]:
        """Keys of the artifacts that a URL names: itself, the one it is in, or those below it."""
        at = key_of(url)
        if has_glob(at):
            folder = parent(at)
            return (folder,) if not has_glob(folder) and self._find(folder) is not None else ()
        if self._find(at) is not None:
            return (self._run_folder(at),)
        holder = self._find(parent(at))
        name = basename(at)
        if holder and (holder.holds(name) or any(_is_of(f.path, name) for f in holder.files)):
            return (parent(at),)
        return tuple(self._below(at))

    def _run_folder(self, key: str) -> str:
        """The run folder of a step; any other key is returned as it is."""
        holder = self._find(parent(key))
        return parent(key) if holder is not None and holder.holds(basename(key)) else key

    def _below(self, folder: str) -> Iterable[str]:
        for name in store.list_files(folder):
            if name.endswith("." + MANIFEST) or basename(name) == MANIFEST:
                key = join(folder, name).removesuffix(MANIFEST).rstrip("/.")
                if self._find(key) is not None:
                    yield key

    def lineage(self, destination: str) -> Lineage:
        """The whole lineage, with similar artifacts grouped."""
        return with_aliases(grouped(list(self.artifacts.values()), list(self.edges), destination))


def _is_of(path: str, prefix: str) -> bool:
    """Whether a file is one of the artifact with a prefix."""
    return path.startswith(prefix + ".")


def key_of(url: str) -> str:
    """One spelling of a URL."""
    path = local_path(url)
    return url.rstrip("/") if path is None else str(path)


def _manifest_at(key: str) -> Manifest | None:
    for url in (f"{key}.{MANIFEST}", join(key, MANIFEST)):
        found = read_manifest(url)
        if found is not None:
            return found[0]
    return None


def describe(key: str, manifest: Manifest) -> Artifact:
    """The artifact of a manifest."""
    seconds = manifest.run.get("seconds")
    return Artifact(
        key=key,
        stage=manifest.stage,
        digest=manifest.output_digest,
        size_bytes=manifest.size_bytes,
        num_files=manifest.num_files,
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
        started=str(manifest.run.get("started", "")),
        code=dict(manifest.code),
        run=dict(manifest.run),
        config=dict(manifest.config),
        metrics=dict(manifest.metrics),
    )


def _source(key: str, digest: str, url: str | None = None, alias: str = "") -> Artifact:
    size = None
    if url is not None and not has_glob(url):
        files = store.list_files(url)
        size = sum(files.values()) if files else None
        if not files and store.exists(url):
            size = store.info(url).size_bytes
    return Artifact(key=key, stage="", digest=digest, size_bytes=size, alias=alias)


# --- grouping -----------------------------------------------------------------------------------


def grouped(artifacts: Sequence[Artifact], edges: Sequence[Edge], destination: str) -> Lineage:
    """Similar artifacts with the same parents and children as one: 8 shards, 300 raw files."""
    for of_sources in (False, True):
        groups: dict[object, list[Artifact]] = {}
        sources = {a.key for a in artifacts if not a.stage}
        children_of: defaultdict[str, set[str]] = defaultdict(set)
        parents_of: defaultdict[str, set[str]] = defaultdict(set)
        for origin, key in edges:
            children_of[origin].add(key)
            if origin not in sources:
                parents_of[key].add(origin)
        for artifact in artifacts:
            children = frozenset(children_of[artifact.key])
            parents = frozenset(parents_of[artifact.key])
            lone = not children or (not artifact.stage) != of_sources
            kind = artifact.key if lone else (artifact.stage, artifact.alias, children, parents)
            groups.setdefault(kind, []).append(artifact)
        merged: dict[str, Artifact] = {}
        for group in groups.values():
            merged |= dict.fromkeys((a.key for a in group), _merged(group))
        artifacts = list({one.key: one for one in merged.values()}.values())
        edges = list(dict.fromkeys((merged[a].key, merged[b].key) for a, b in edges))
    return Lineage(artifacts=tuple(artifacts), edges=tuple(edges), destination=destination)


def _merged(group: Sequence[Artifact]) -> Artifact:
    group = sorted(group, key=lambda one: one.key)  # the digest must not depend on their order
    first = group[0]
    if len(group) == 1:
        return first
    sizes = [a.size_bytes for a in group if a.size_bytes is not None]
    seconds = [a.seconds for a in group if a.seconds is not None]
    return replace(
        first,
        key=f"{first.key} ... {basename(group[-1].key)}",
        digest=digest_document([a.digest for a in group]) if first.digest else "",
        size_bytes=sum(sizes) if sizes else None,
        num_files=sum(a.num_files for a in group),
        count=len(group),
        seconds=sum(seconds) if seconds else None,
    )


def with_aliases(lineage: Lineage) -> Lineage:
    """Artifacts of one stage named by the last part of their URLs: reshard, export. Where another
    stage has one of that name too, the stage stands before it."""
    stages = Counter(a.stage for a in lineage.artifacts)
    many = {a.key: a.stage for a in lineage.artifacts if a.stage and stages[a.stage] > 1}
    owners = {(stage, basename(key)) for key, stage in many.items()}
    names = Counter(name for _, name in owners)

    def named(artifact: Artifact) -> Artifact:
        name = basename(artifact.key)
        return replace(artifact, alias=name, alias_is_shared=names[name] > 1)

    artifacts = tuple(named(a) if a.key in many else a for a in lineage.artifacts)
    return replace(lineage, artifacts=artifacts)
