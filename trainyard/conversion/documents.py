"""Reads another program's JSON document, within bounds of size, depth and numbers."""

from __future__ import annotations

from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.strict_json import MAX_COUNT, check_depth, parse_json, shown
from trainyard.errors import ArtifactError

MAX_BYTES = 16 * 2**20
"""The indices of the largest published models have nine megabytes."""


def read_document(url: str, *, infinity: bool = False) -> Any:
    """The JSON document in a file. Raises ArtifactError, which names the file. infinity: read the
    word Infinity, which is not JSON, as strict_json.INFINITY."""
    size = store.info(url).size_bytes
    if size > MAX_BYTES:
        raise ArtifactError(f"{url}: has {size} bytes; a document may have {MAX_BYTES} at most")
    document = parse_json(store.read_bytes(url), url, infinity=infinity)
    check_depth(document, url)
    _check_numbers(document, url)
    return document


def _check_numbers(document: Any, url: str) -> None:
    """Refuse whole numbers of more than 64 bits, which other programs would not read exactly.

    The depth of the document must be checked before."""
    level = [document]
    while level:
        for item in level:
            if type(item) is int and not -MAX_COUNT <= item <= MAX_COUNT:
                raise ArtifactError(f"{url}: the number {shown(item)} takes more than 64 bits")
        inner = (list(item.values()) if isinstance(item, dict) else item for item in level)
        level = [one for item in inner if isinstance(item, list) for one in item]
