"""Which artifacts a run was made of: from the manifests named, back through what each was made
from, to sources that no stage made.

An input is followed by its URL and held to its digest: an artifact that was made anew since stands
beside the run as an earlier version, not as its origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import lru_cache

from stages.report.facts import Artifact, Lineage
from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.manifest import InputRecord, Manifest, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import basename, has_glob, join, local_path, parent

Edge = tuple[str, str]

MAX_SIZED = 64
"""Raw sources of one input whose sizes are asked for; a store is not asked about thousands."""


class Ancestry:
    """Artifacts found so far, and which went into which."""

    def __init__(self) -> None:
        self.artifacts: dict[str, Artifact] = {}
        self.edges: dict[Edge, None] = {}
        self.manifests: dict[str, Manifest] = {}
        self._find = lru_cache(maxsize=None)(_manifest_at)

    def add(self, url: str) -> str:
        """Enter the artifact at a URL and all it came from; returns its key."""
        for key in self._artifacts_of(url):
            self._enter(key)
            return key
        self.artifacts.setdefault(_key(url), _source(_key(url), ""))
        return _key(url)

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
        """False when the one artifact at a URL is no longer what the input was."""
        manifest = self._find(found[0])
        if len(record.urls) > 1 or len(found) > 1 or manifest is None:
            return True  # the digest is one of many together
        if found[0] == _key(url):
            return manifest.output_digest == record.digest
        listed = manifest.record(_key(url).removeprefix(found[0]).lstrip("/"))
        return listed is None or listed.digest == record.digest

    def _raw(self, url: str, record: InputRecord, is_earlier: bool) -> str:
        key = f"{url} @ {record.digest[:12]}" if is_earlier else url
        if key not in self.artifacts:
            sized = not is_earlier and len(record.urls) <= MAX_SIZED
            digest = record.digest if len(record.urls) == 1 else ""
            alias = f"earlier {basename(url.rstrip('/'))}" if is_earlier else ""
            self.artifacts[key] = _source(key, digest, url if sized else None, alias)
        return key

    def _artifacts_of(self, url: str) -> tuple[str, ...]:
        """Keys of the artifacts that a URL means: itself, the one it is part of, those it holds."""
        at = _key(url)
        if has_glob(at):
            folder = parent(at)
            return (folder,) if not has_glob(folder) and self._find(folder) is not None else ()
        if self._find(at) is not None:
            return (self._whole(at),)
        holder = self._find(parent(at))
        if holder is not None and any(_is_part(f.path, basename(at)) for f in holder.files):
            return (parent(at),)
        return tuple(self._held(at))

    def _whole(self, key: str) -> str:
        """The run folder, for the folder of one of its steps."""
        holder = self._find(parent(key))
        inside = basename(key) + "/"
        is_step = holder is not None and any(f.path.startswith(inside) for f in holder.files)
        return parent(key) if is_step else key

    def _held(self, folder: str) -> Iterable[str]:
        for name in store.list_files(folder):
            if name.endswith("." + MANIFEST) or basename(name) == MANIFEST:
                key = join(folder, name).removesuffix(MANIFEST).rstrip("/.")
                if self._find(key) is not None:
                    yield key

    def lineage(self, destination: str) -> Lineage:
        """All of it, with artifacts that are alike drawn together."""
        return named_apart(grouped(list(self.artifacts.values()), list(self.edges), destination))


def _key(url: str) -> str:
    """One spelling of a place."""
    path = local_path(url)
    return url.rstrip("/") if path is None else str(path)


def _manifest_at(key: str) -> Manifest | None:
    for url in (f"{key}.{MANIFEST}", join(key, MANIFEST)):
        found = read_manifest(url)
        if found is not None:
            return found[0]
    return None


def _is_part(path: str, name: str) -> bool:
    return path == name or path.startswith((name + "/", name + "."))


def describe(key: str, manifest: Manifest) -> Artifact:
    """The artifact that a manifest is of."""
    seconds = manifest.run.get("seconds")
    return Artifact(
        key=key,
        stage=manifest.stage,
        digest=manifest.output_digest,
        size_bytes=sum(record.size_bytes for record in manifest.files),
        num_files=len(manifest.files),
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


# --- many alike are one -----------------------------------------------------------------------


def grouped(artifacts: Sequence[Artifact], edges: Sequence[Edge], destination: str) -> Lineage:
    """Sources and parts that go the same way as one node: 8 tokenized shards, 300 raw files."""
    for of_sources in (False, True):
        alike: dict[object, list[Artifact]] = {}
        sources = {a.key for a in artifacts if not a.stage}
        for artifact in artifacts:
            children = frozenset(c for p, c in edges if p == artifact.key)
            parents = frozenset(p for p, c in edges if c == artifact.key and p not in sources)
            lone = not children or (not artifact.stage) != of_sources
            kind = artifact.key if lone else (artifact.stage, artifact.alias, children, parents)
            alike.setdefault(kind, []).append(artifact)
        together = [_together(group) for group in alike.values()]
        keys = {
            a.key: one.key
            for group, one in zip(alike.values(), together, strict=True)
            for a in group
        }
        artifacts = together
        edges = list(dict.fromkeys((keys[a], keys[b]) for a, b in edges))
    return Lineage(artifacts=tuple(artifacts), edges=tuple(edges), destination=destination)


def _together(group: Sequence[Artifact]) -> Artifact:
    group = sorted(group, key=lambda one: one.key)  # whichever was found first: one digest
    first = group[0]
    if len(group) == 1:
        return first
    sizes = [a.size_bytes for a in group if a.size_bytes is not None]
    seconds = [a.seconds for a in group if a.seconds is not None]
    return dataclasses.replace(
        first,
        key=f"{first.key} ... {basename(group[-1].key)}",
        digest=digest_document([a.digest for a in group]) if first.digest else "",
        size_bytes=sum(sizes) if sizes else None,
        num_files=sum(a.num_files for a in group),
        count=len(group),
        seconds=sum(seconds) if seconds else None,
    )


def named_apart(lineage: Lineage) -> Lineage:
    """Artifacts of one stage told apart by the last part of their place: reshard, export."""
    stages = [a.stage for a in lineage.artifacts]
    artifacts = tuple(
        dataclasses.replace(a, alias=basename(a.key))
        if a.stage and stages.count(a.stage) > 1
        else a
        for a in lineage.artifacts
    )
    return dataclasses.replace(lineage, artifacts=artifacts)
