"""Files of a published artifact, read as its manifest lists them: size first, then digest.

Whoever reads a document of an artifact reads it here, so that nothing is made of one that was
changed, cut short or grown since it was published. Tensors and tokens, which are large, are held to
their sizes where they are read; `verify` compares their digests."""

from __future__ import annotations

from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.strict_json import check_depth, parse_json
from trainyard.errors import ArtifactError

DAMAGED = "the file is damaged or was replaced"


def read_listed(url: str, record: FileRecord | None) -> bytes:
    """A whole file. record: its own in the manifest, None where that has none.

    Raises ArtifactError, before it is read where its size tells, for another file than that."""
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
    """A JSON document, read so."""
    document = parse_json(read_listed(url, record), url)
    check_depth(document, url)
    return document


def check_digest(url: str, record: FileRecord | None, digest: str) -> None:
    """Raise ArtifactError unless the file at a URL has the digest of its record."""
    if record is None:
        raise ArtifactError(f"{url}: {MANIFEST} does not list it")
    if digest != record.digest:
        raise ArtifactError(f"{url}: digest {digest}, {MANIFEST} says {record.digest}; {DAMAGED}")
