"""Manifests: a stage writes them last, and an artifact exists only with its manifest.

    {"format_version": 1, "status": "complete", "stage": "tokenize", "lineage": "...",
     "code": {"version": "0.1.0", "digest": "..."}, "config": {...}, "config_digest": "...",
     "inputs": {"input": {"urls": [...], "digest": "..."}},
     "files": [{"path": "...", "size_bytes": 1, "digest": "...", "volatile": false}],
     "output_digest": "...", "metrics": {...}, "run": {"seconds": 1.5, ...}}

The output digest is a pure function of the files that are not volatile. Before a rerun overwrites
the first final file, it replaces the manifest by one of status "replacing", which readers treat as
missing. `read_listed` reads documents of an artifact and compares them with the manifest: size
first, then digest."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trainyard.artifacts import conditional, store
from trainyard.artifacts.digest import digest_bytes, digest_files
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.strict_json import check_depth, parse_json
from trainyard.artifacts.urls import check_relative
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError

FORCE = "TRAINYARD_FORCE"
"""Variable with the id of the flow run that forces a stage. The manifest records it, so that the
stage runs once for this flow run, however often it is retried or requeued."""

FORMAT_VERSION = 1

Version: TypeAlias = str


@dataclass(frozen=True, slots=True)
class InputRecord:
    """An input as the run that used it found it."""

    urls: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """An artifact: its stage, configuration, inputs and files."""

    stage: str
    lineage: str = ""
    """Digest of inputs and configuration; equal lineages may share unfinished work."""
    code: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    config_digest: str = ""
    inputs: dict[str, InputRecord] = field(default_factory=dict)
    files: tuple[FileRecord, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    """Facts of the run that made it (seconds, when, on what): outside every digest."""

    @property
    def output_digest(self) -> str:
        """A pure function of the contents: equal outputs have equal digests at any URL."""
        return digest_files((f.path, f.size_bytes, f.digest) for f in self.files if not f.volatile)

    def to_document(self) -> dict[str, Any]:
        """The JSON document, files in the order of their names."""
        document = dataclasses.asdict(self)
        document["files"] = sorted(document["files"], key=lambda f: str(f["path"]))
        head = {"format_version": FORMAT_VERSION, "status": "complete"}
        return {**head, **document, "output_digest": self.output_digest}

    def record(self, path: str) -> FileRecord | None:
        """The file of that name."""
        return next((f for f in self.files if f.path == path), None)


def _encode(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()


def parse(data: bytes, url: str) -> Manifest | None:
    """The manifest in a document; None for one that is being replaced.

    Raises ArtifactError for a broken document, a newer format, or names that leave the artifact."""
    try:
        document = json.loads(data)
        version = document["format_version"]
        if version > FORMAT_VERSION:
            raise ArtifactError(
                f"{url}: manifest format {version} is newer than {FORMAT_VERSION}, the newest this "
                f"version of trainyard reads; upgrade trainyard"
            )
        if document["status"] not in ("complete", "replacing"):
            raise ValueError(f"status {document['status']!r}")
        if document["status"] == "replacing":
            return None
        manifest = _from_document(document)
        for record in manifest.files:
            _check_record(record)
        if len({record.path for record in manifest.files}) < len(manifest.files):
            raise ValueError("a file is listed twice")
    except ConfigError as error:
        raise ArtifactError(f"{url}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(
            f"{url}: not a manifest ({error!r}); remove it and rerun the stage"
        ) from error
    if manifest.output_digest != document.get("output_digest"):
        raise ArtifactError(
            f"{url}: the output digest does not match the listed files; the manifest was edited"
        )
    return manifest


def _check_record(record: FileRecord) -> None:
    fields = (record.path, record.size_bytes, record.digest, record.volatile)
    if [type(field) for field in fields] != [str, int, str, bool] or record.size_bytes < 0:
        raise ValueError(f"{record!r} is not a file")
    check_relative(record.path)


def _from_document(document: dict[str, Any]) -> Manifest:
    names = {f.name for f in dataclasses.fields(Manifest)}
    values = {key: value for key, value in document.items() if key in names}
    for name in ("code", "config", "metrics", "run"):
        if not isinstance(values.get(name, {}), dict):
            raise TypeError(f"{name} is not a table")
    values["files"] = tuple(FileRecord(**record) for record in document["files"])
    values["inputs"] = {
        name: InputRecord(tuple(record["urls"]), record["digest"])
        for name, record in document["inputs"].items()
    }
    return Manifest(**values)


def read_manifest(url: str) -> tuple[Manifest, Version] | None:
    """The manifest at a URL and its version; None when there is none or it is being replaced."""
    found = conditional.read_version(url)
    if found is None:
        return None
    manifest = parse(found[0], url)
    return None if manifest is None else (manifest, found[1])


@dataclass(frozen=True, slots=True)
class ManifestSlot:
    """The document at a manifest's URL: a manifest, or the mark of a run that is replacing one."""

    version: Version
    files: tuple[str, ...]
    """The files that it lists. The next run removes those that its manifest does not list."""


def read_slot(url: str) -> ManifestSlot | None:
    """The document at a manifest's URL, also one that is being replaced; None without any."""
    found = conditional.read_version(url)
    if found is None:
        return None
    try:
        listed = json.loads(found[0])["files"]
        names = tuple(check_relative(f if isinstance(f, str) else f["path"]) for f in listed)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        names = ()
    return ManifestSlot(found[1], names)


def retire(url: str, slot: ManifestSlot, by: str) -> ManifestSlot:
    """Mark the manifest that was read as being replaced; from then on the artifact does not exist.

    Raises InfrastructureError if another run replaced it in between."""
    tombstone = _encode(
        {
            "format_version": FORMAT_VERSION,
            "status": "replacing",
            "by": by,
            "files": list(slot.files),
        }
    )
    version = slot.version
    replaced = conditional.replace_if_match(url, tombstone, version)
    if replaced is None:
        raise InfrastructureError(
            f"{url}: another run replaced this manifest at the same time; nothing was written"
        )
    return ManifestSlot(replaced, slot.files)


def publish(url: str, manifest: Manifest, replacing: Version | None) -> Version:
    """Write the manifest: create-only, or over the version that was read.

    Raises InfrastructureError for the loser of a race; the winner's manifest stays."""
    data = _encode(manifest.to_document())
    if replacing is None:
        version = conditional.put_if_absent(url, data)
    else:
        version = conditional.replace_if_match(url, data, replacing)
    if version is None:
        raise InfrastructureError(
            f"{url}: another run published first; its result stays, ours was dropped"
        )
    return version


# --- files that a manifest lists --------------------------------------------------------------


DAMAGED = "the file is damaged or was replaced; restore a copy, or make it again"


def read_listed(url: str, record: FileRecord | None) -> bytes:
    """A whole file, if it matches `record`, its entry in the manifest (None: it has none).

    Raises ArtifactError for a file that differs; before reading if the size differs."""
    if record is None:
        raise ArtifactError(f"{url}: {MANIFEST} does not list it")
    size = store.info(url).size_bytes
    if size != record.size_bytes:
        raise ArtifactError(
            f"{url}: {size} bytes, {MANIFEST} says {record.size_bytes} bytes; {DAMAGED}"
        )
    data = store.read_bytes(url)
    check_digest(url, record, digest_bytes(data))
    return data


def read_listed_json(url: str, record: FileRecord | None) -> Any:
    """A JSON document, read with `read_listed`."""
    document = parse_json(read_listed(url, record), url)
    check_depth(document, url)
    return document


def check_digest(url: str, record: FileRecord | None, digest: str) -> None:
    """Raise ArtifactError unless the file at a URL has the digest of its record."""
    if record is None:
        raise ArtifactError(f"{url}: {MANIFEST} does not list it")
    if digest != record.digest:
        raise ArtifactError(f"{url}: digest {digest}, {MANIFEST} says {record.digest}; {DAMAGED}")
