"""Manifests: a stage writes them last, and an artifact exists only with its manifest.

    {"format_version": 1, "status": "complete", "stage": "tokenize", "lineage": "...",
     "code": {"version": "0.1.0", "digest": "..."}, "config": {...}, "config_digest": "...",
     "inputs": {"input": {"urls": [...], "digest": "..."}},
     "files": [{"path": "...", "size_bytes": 1, "digest": "...", "volatile": false}],
     "output_digest": "...", "metrics": {...}, "run": {"seconds": 1.5, ...}}

The output digest is a pure function of the files that are not volatile. An artifact of many files,
such as a run with its steps, names folders that have a manifest of their own (format version 2):

    "parts": [{"path": "iter_0000050", "output_digest": "...", "size_bytes": 1, "num_files": 1}]

`parts.py` looks into them. Before a rerun overwrites
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
from trainyard.json_text import indented

FORCE = "TRAINYARD_FORCE"
"""Variable with the id of the flow run that forces a stage. The manifest records it, so that the
stage runs once for this flow run, however often it is retried or requeued."""

FORMAT_VERSION = 2
"""The newest that is read. Manifests without parts are written as version 1."""

Version: TypeAlias = str


@dataclass(frozen=True, slots=True)
class InputRecord:
    """An input as the run that used it found it."""

    urls: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A folder of an artifact with a manifest of its own, such as a step of a run."""

    path: str
    """Relative to the artifact."""
    output_digest: str
    size_bytes: int
    """Of all files that its manifest lists."""
    num_files: int

    @staticmethod
    def of(path: str, manifest: Manifest) -> PartRecord:
        """The record of a folder with that manifest."""
        return PartRecord(path, manifest.output_digest, manifest.size_bytes, manifest.num_files)


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
    parts: tuple[PartRecord, ...] = ()
    """Folders whose files `files` leaves out, as their own manifests list them."""
    metrics: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    """Facts of the run that made it (seconds, when, on what): outside every digest."""

    @property
    def output_digest(self) -> str:
        """A pure function of the contents: equal outputs have equal digests at any URL."""
        files = [(f.path, f.size_bytes, f.digest) for f in self.files if not f.volatile]
        return digest_files([*files, *((f"{p.path}/", 0, p.output_digest) for p in self.parts)])

    @property
    def size_bytes(self) -> int:
        """Of all files, those of parts included."""
        return sum(f.size_bytes for f in self.files) + sum(p.size_bytes for p in self.parts)

    @property
    def num_files(self) -> int:
        """Of all files, those of parts included."""
        return len(self.files) + sum(part.num_files for part in self.parts)

    def to_document(self) -> dict[str, Any]:
        """The JSON document, files in the order of their names."""
        document = _fields(self)
        document["inputs"] = {name: _fields(found) for name, found in self.inputs.items()}
        document["files"] = [_fields(f) for f in sorted(self.files, key=lambda f: f.path)]
        document["parts"] = [_fields(part) for part in sorted(self.parts, key=lambda p: p.path)]
        if not self.parts:
            del document["parts"]
        head = {"format_version": 2 if self.parts else 1, "status": "complete"}
        return {**head, **document, "output_digest": self.output_digest}

    def record(self, path: str) -> FileRecord | None:
        """The file of that name."""
        return next((f for f in self.files if f.path == path), None)

    def holds(self, name: str) -> bool:
        """Whether it lists a file of that name, or files in a folder of that name."""
        inside = name + "/"
        files = any(f.path == name or f.path.startswith(inside) for f in self.files)
        return files or any(part.path == name for part in self.parts)


def _fields(record: Any) -> dict[str, Any]:
    # dataclasses.asdict copies all that is in them, which is half of what a small manifest costs.
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _encode(document: dict[str, Any]) -> bytes:
    return (indented(document) + "\n").encode()


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
        for part in manifest.parts:
            _check_part(part)
        paths = [*(f.path for f in manifest.files), *(p.path for p in manifest.parts)]
        if len(set(paths)) < len(paths):
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


def _check_part(part: PartRecord) -> None:
    fields = (part.path, part.output_digest, part.size_bytes, part.num_files)
    if [type(field) for field in fields] != [str, str, int, int] or part.size_bytes < 0:
        raise ValueError(f"{part!r} is not a part")
    check_relative(part.path)


def _from_document(document: dict[str, Any]) -> Manifest:
    names = {f.name for f in dataclasses.fields(Manifest)}
    values = {key: value for key, value in document.items() if key in names}
    for name in ("code", "config", "metrics", "run"):
        if not isinstance(values.get(name, {}), dict):
            raise TypeError(f"{name} is not a table")
    values["files"] = tuple(FileRecord(**record) for record in document["files"])
    values["parts"] = tuple(PartRecord(**record) for record in document.get("parts", ()))
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
    parts: tuple[str, ...] = ()
    """The folders that it names as parts; likewise."""


def read_slot(url: str) -> ManifestSlot | None:
    """The document at a manifest's URL, also one that is being replaced; None without any."""
    found = conditional.read_version(url)
    if found is None:
        return None
    try:
        document = json.loads(found[0])
        files, parts = (_names(document.get(key, ())) for key in ("files", "parts"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        files, parts = (), ()
    return ManifestSlot(found[1], files, parts)


def _names(records: Any) -> tuple[str, ...]:
    return tuple(check_relative(r if isinstance(r, str) else r["path"]) for r in records)


def retire(url: str, slot: ManifestSlot, by: str) -> ManifestSlot:
    """Mark the manifest that was read as being replaced; from then on the artifact does not exist.

    Raises InfrastructureError if another run replaced it in between."""
    tombstone = _encode(
        {
            "format_version": 2 if slot.parts else 1,
            "status": "replacing",
            "by": by,
            "files": list(slot.files),
            **({"parts": list(slot.parts)} if slot.parts else {}),
        }
    )
    version = slot.version
    replaced = conditional.replace_if_match(url, tombstone, version)
    if replaced is None:
        raise InfrastructureError(
            f"{url}: another run replaced this manifest at the same time; nothing was written"
        )
    return ManifestSlot(replaced, slot.files, slot.parts)


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
