"""The index of a step: for every global tensor its type, its shape, and where its pieces lie.

    {"format_version": 1, "tensors": {
        "model.decoder.final_layernorm.weight": {"dtype": "F32", "shape": [64], "pieces": [
            {"file": "model-00001-of-00002.safetensors",
             "key": "model.decoder.final_layernorm.weight", "offset": [0], "shape": [64]}]}}}

Pure: documents in, entries out. An index may come from anywhere, so nothing in it is trusted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.checkpoint.tensorfile import DTYPES
from trainyard.errors import ArtifactError

FORMAT_VERSION = 1

PLAIN_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
"""Names of tensor files: in the step folder itself, never elsewhere."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice at rest."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A global tensor at rest: its pieces cover it without overlap."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


# --- the document -----------------------------------------------------------------------------


def encode_index(entries: Mapping[str, Entry]) -> bytes:
    """The document, one tensor a line, in the order of the names."""
    lines = []
    for name, entry in sorted(entries.items()):
        pieces = [
            {"file": p.file, "key": p.key, "offset": list(p.offset), "shape": list(p.shape)}
            for p in entry.pieces
        ]
        value = {"dtype": entry.dtype, "shape": list(entry.shape), "pieces": pieces}
        lines.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    body = ",\n".join(lines)
    return f'{{\n "format_version": {FORMAT_VERSION},\n "tensors": {{\n{body}\n }}\n}}\n'.encode()


def check_version(document: Any, url: str) -> None:
    """Refuse a document of a newer format, or one that does not say which."""
    version = document.get("format_version") if isinstance(document, dict) else None
    if type(version) is not int or version < 1:
        raise ArtifactError(
            f"{url}: no format_version, so not a document of a trainyard checkpoint"
        )
    if version > FORMAT_VERSION:
        raise ArtifactError(
            f"{url}: format_version {version} is newer than {FORMAT_VERSION}, the newest that this "
            f"version of trainyard reads; upgrade trainyard"
        )


def parse_index(document: Any, url: str) -> dict[str, Entry]:
    """The entries of a document that was read from `url`.

    Raises ArtifactError naming the tensor unless its pieces cover it exactly."""
    check_version(document, url)
    try:
        entries = {name: _entry(value) for name, value in document["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{url}: not an index of tensors: {error!r}") from error
    for name, entry in entries.items():
        reason = fault(entry)
        if reason is not None:
            raise ArtifactError(f"{url}: tensor {name!r}: {reason}")
    return entries


def _entry(value: Any) -> Entry:
    pieces = tuple(
        Piece(str(p["file"]), str(p["key"]), _counts(p["offset"]), _counts(p["shape"]))
        for p in value["pieces"]
    )
    return Entry(str(value["dtype"]), _counts(value["shape"]), pieces)


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{values!r} is not a list of counts")
    return tuple(values)


# --- the law that an index must obey ----------------------------------------------------------


def fault(entry: Entry) -> str | None:
    """Why the pieces are not an exact cover of the tensor; None when they are."""
    if entry.dtype not in DTYPES:
        return f"dtype {entry.dtype!r} is not one of {', '.join(DTYPES)}"
    for piece in entry.pieces:
        if not PLAIN_FILE.fullmatch(piece.file):
            return f"file name {piece.file!r} is not a plain NAME.safetensors in the step folder"
        if len(piece.offset) != len(entry.shape) or len(piece.shape) != len(entry.shape):
            return f"piece {piece.key!r} has {len(piece.shape)} dims, the tensor {len(entry.shape)}"
        ends = [o + s for o, s in zip(piece.offset, piece.shape, strict=True)]
        if any(end > size for end, size in zip(ends, entry.shape, strict=True)):
            return f"piece {piece.key!r} ends at {ends}, outside the tensor {list(entry.shape)}"
    pair = _overlap(entry.pieces)
    if pair is not None:
        return f"pieces {pair[0].key!r} and {pair[1].key!r} overlap"
    covered = sum(math.prod(piece.shape) for piece in entry.pieces)
    if covered != math.prod(entry.shape) or not entry.pieces:
        return f"its pieces hold {covered} of {math.prod(entry.shape)} elements"
    return None


def _overlap(pieces: Sequence[Piece]) -> tuple[Piece, Piece] | None:
    """Two pieces that share an element, found by a sweep along the dim with the most cuts."""
    if len(pieces) < 2:
        return None
    num_dims = len(pieces[0].shape)
    if num_dims == 0:
        return pieces[0], pieces[1]
    dim = max(range(num_dims), key=lambda d: len({p.offset[d] for p in pieces}))
    active: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: p.offset[dim]):
        active = [a for a in active if a.offset[dim] + a.shape[dim] > piece.offset[dim]]
        for other in active:
            if _intersect(piece, other):
                return other, piece
        active.append(piece)
    return None


def _intersect(a: Piece, b: Piece) -> bool:
    return all(
        max(ao, bo) < min(ao + an, bo + bn)
        for ao, an, bo, bn in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )
