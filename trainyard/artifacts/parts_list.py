"""The list of the parts of a virtual dataset: pairs of token files that are read end to end, as if
they were merged.

PREFIX.parts takes the place of PREFIX.bin and PREFIX.idx. It is JSON, and grows with the number of
pairs only:

    {"format_version": 1, "dtype": "uint16", "multimodal": false, "provenance": true,
     "parts": [{"prefix": "../parts/a_text_document", "documents": 2, "sequences": 2,
                "size_bytes": 84, "bin_digest": "...", "idx_digest": "..."}]}

dtype: of a token. prefix: of a pair, relative to the folder of this file, or absolute for a pair in
another store. size_bytes: of its .bin, so the tokens of a part begin where the sizes before it add
up to. provenance: whether every part has a .docs sidecar.

Knows nothing of what is in token files."""

from __future__ import annotations

import json
import os
import posixpath
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.inputs import Manifests
from trainyard.artifacts.manifest import check_digest
from trainyard.artifacts.strict_json import parse_json
from trainyard.artifacts.urls import (
    canonical,
    has_credentials,
    is_local,
    is_web,
    parent,
    show_url,
)
from trainyard.errors import ArtifactError

FORMAT_VERSION = 1
MAX_PREFIX_CHARS = 4096
"""Longest path of Linux; those of object stores are shorter."""
SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class Part:
    """One pair of a virtual dataset."""

    prefix: str
    documents: int
    sequences: int
    size_bytes: int
    """Of its .bin."""
    bin_digest: str
    """Empty in a folder of pairs, which records none."""
    idx_digest: str


@dataclass(frozen=True, slots=True)
class PartsList:
    """The contents of a .parts, with the prefixes as anyone may open them."""

    dtype: str
    is_multimodal: bool
    has_provenance: bool
    parts: tuple[Part, ...]

    def encode(self, url: str) -> bytes:
        """The file for a place."""
        records = [replace(part, prefix=_relative(part.prefix, url)) for part in self.parts]
        document = {
            "format_version": FORMAT_VERSION,
            "dtype": self.dtype,
            "multimodal": self.is_multimodal,
            "provenance": self.has_provenance,
            "parts": [asdict(record) for record in records],
        }
        return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def read_parts(url: str, manifests: Manifests | None = None) -> PartsList:
    """The contents of a .parts; ArtifactError if it is not one, or not that of its manifest."""
    data = store.read_bytes(url)
    record = (manifests or Manifests()).record(url)
    if record is not None:
        check_digest(url, record, digest_bytes(data))
    document = parse_json(data, url)
    try:
        if document["format_version"] > FORMAT_VERSION:
            raise ArtifactError(
                f"{url}: format {document['format_version']} is newer than {FORMAT_VERSION}, the "
                "newest this version of trainyard reads; upgrade trainyard"
            )
        return _parsed(document, url)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{url}: not the parts of a virtual dataset ({error!r})") from error


def _parsed(document: dict[str, Any], url: str) -> PartsList:
    values = [document[name] for name in ("dtype", "multimodal", "provenance")]
    if [type(value) for value in values] != [str, bool, bool]:
        raise ValueError(f"{values} are not a type and two flags")
    parts = tuple(_part(record, url) for record in document["parts"])
    if not parts:
        raise ValueError("no part")
    dtype, is_multimodal, has_provenance = values
    return PartsList(dtype, is_multimodal, has_provenance, parts)


def _part(record: dict[str, Any], url: str) -> Part:
    part = Part(**record)
    numbers = (part.documents, part.sequences, part.size_bytes)
    texts = (part.prefix, part.bin_digest, part.idx_digest)
    if any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"{numbers} are not three sizes")
    if any(type(text) is not str or not text for text in texts):
        raise ValueError("a part without a prefix or digest")
    return replace(part, prefix=_absolute(part.prefix, url))


def _relative(prefix: str, url: str) -> str:
    """A prefix as its record in the file at `url` names it."""
    if is_local(prefix) and is_local(url):
        return os.path.relpath(canonical(prefix), canonical(parent(url)))
    if is_local(prefix) or is_local(url) or prefix.split("/")[:3] != url.split("/")[:3]:
        return canonical(prefix)
    head = "/".join(url.split("/")[:3])
    path, folder = (one.removeprefix(head) or "/" for one in (prefix, parent(url)))
    return posixpath.relpath(path, folder)


def _absolute(name: str, url: str) -> str:
    """The prefix that a record in the file at `url` names. Raises ValueError for a place that a
    file from there has no business to name."""
    shown = show_url(name)[:SHOWN_CHARS]
    if "\0" in name or is_web(name) or has_credentials(name) or len(name) > MAX_PREFIX_CHARS:
        raise ValueError(f"{shown!r} is not a prefix in a store")
    if "://" in name or name.startswith("/"):
        if is_local(name) and not is_local(url):
            raise ValueError(f"{shown!r}: a path of a machine, named in an object store")
        return name
    folder = canonical(parent(url))
    if is_local(url):
        return os.path.normpath(os.path.join(folder, name))
    head, path = "/".join(url.split("/")[:3]), "/".join(["", *folder.split("/")[3:]])
    return head + posixpath.normpath(posixpath.join(path, name))
