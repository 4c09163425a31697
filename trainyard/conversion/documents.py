"""A JSON document of others: bounded in size, depth and numbers before a field of it is looked at.

Nothing of it is trusted. What two readers may take for two things is refused as in files of ours
(`strict`); which fields a document must have, its reader says."""

from __future__ import annotations

from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.strict_json import MAX_COUNT, check_depth, parse_json, shown
from trainyard.errors import ArtifactError

MAX_BYTES = 32 * 2**20
"""Indices of the largest models that are published have nine megabytes."""


def read_document(url: str) -> Any:
    """The document in a file. Raises ArtifactError naming it."""
    size = store.info(url).size_bytes
    if size > MAX_BYTES:
        raise ArtifactError(f"{url}: has {size} bytes; a document here has {MAX_BYTES} at most")
    document = parse_json(store.read_bytes(url), url)
    check_depth(document, url)
    _check_numbers(document, url)
    return document


def _check_numbers(document: Any, url: str) -> None:
    """Refuse whole numbers that no other program would read as they are; the depth is checked."""
    level = [document]
    while level:
        for item in level:
            if type(item) is int and not -MAX_COUNT <= item <= MAX_COUNT:
                raise ArtifactError(f"{url}: the number {shown(item)} takes more than 64 bits")
        inner = (list(item.values()) if isinstance(item, dict) else item for item in level)
        level = [one for item in inner if isinstance(item, list) for one in item]
