"""The index of a step: type, shape and pieces of every global tensor.

    {"format_version": 1, "tensors": {
        "model.decoder.final_layernorm.weight": {"dtype": "F32", "shape": [64], "pieces": [
            {"file": "model-00001-of-00002.safetensors",
             "key": "model.decoder.final_layernorm.weight", "offset": [0], "shape": [64],
             "digests": "3fd0..."}]}}}

Pure: documents in, entries out. An index is untrusted input, so every value in it is checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.artifacts.strict_json import counts, shown, text
from trainyard.checkpoint.safetensors.blocks import num_digits
from trainyard.checkpoint.safetensors.header import TensorSpec, fault_of_spec
from trainyard.checkpoint.steps import FORMAT_VERSION
from trainyard.errors import ArtifactError

PLAIN_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
"""Names of tensor files, which are directly in the step folder."""

MAX_COMPARISONS = 2000
"""Comparisons of pieces in the search for overlaps, on average for each piece of a tensor. Slices
of any number of ranks take a few; only an index made to exhaust the check takes more."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A part of a global tensor, stored as one tensor of a file."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    digests: str = ""
    """Digests of its blocks (`safetensors.blocks`); empty in steps of versions that wrote none."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored global tensor: its pieces cover it without overlap."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]


@dataclass(frozen=True, slots=True)
class Located:
    """The part of a requested box that one piece holds."""

    piece: TensorPiece
    offset: tuple[int, ...]
    """Its start in the piece."""
    at: tuple[int, ...]
    """Its start in the box."""
    shape: tuple[int, ...]


def locate(entry: TensorEntry, offset: Sequence[int], shape: Sequence[int]) -> list[Located]:
    """The pieces that hold parts of a box of a tensor."""
    sides = list(zip(offset, shape, entry.shape, strict=True))
    assert all(0 <= o <= o + n <= whole for o, n, whole in sides), (offset, shape, entry.shape)
    found = (_common(offset, shape, piece) for piece in entry.pieces)
    return [part for part in found if part is not None]


def _common(offset: Sequence[int], shape: Sequence[int], piece: TensorPiece) -> Located | None:
    begins = [max(o, p) for o, p in zip(offset, piece.offset, strict=True)]
    sides = zip(offset, shape, piece.offset, piece.shape, strict=True)
    ends = [min(o + s, p + n) for o, s, p, n in sides]
    if any(e <= b for b, e in zip(begins, ends, strict=True)):
        return None
    return Located(
        piece,
        tuple(b - p for b, p in zip(begins, piece.offset, strict=True)),
        tuple(b - o for b, o in zip(begins, offset, strict=True)),
        tuple(e - b for b, e in zip(begins, ends, strict=True)),
    )


# --- the document -----------------------------------------------------------------------------


def encode_index(entries: Mapping[str, TensorEntry]) -> bytes:
    """The document, one tensor per line, sorted by name."""
    lines = []
    for name, entry in sorted(entries.items()):
        pieces = [
            {"file": p.file, "key": p.key, "offset": list(p.offset), "shape": list(p.shape)}
            | ({"digests": p.digests} if p.digests else {})
            for p in entry.pieces
        ]
        value = {"dtype": entry.dtype, "shape": list(entry.shape), "pieces": pieces}
        lines.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    body = ",\n".join(lines)
    return f'{{\n "format_version": {FORMAT_VERSION},\n "tensors": {{\n{body}\n }}\n}}\n'.encode()


def check_version(document: Any, url: str) -> None:
    """Refuse a document of a newer format, or without a format version."""
    version = document.get("format_version") if isinstance(document, dict) else None
    if type(version) is not int or version < 1:
        raise ArtifactError(
            f"{url}: has no format_version, so it is not a document of a trainyard checkpoint"
        )
    if version > FORMAT_VERSION:
        raise ArtifactError(
            f"{url}: format_version {version} is newer than {FORMAT_VERSION}, the newest that this "
            f"version of trainyard reads; upgrade trainyard"
        )


def parse_index(document: Any, url: str) -> dict[str, TensorEntry]:
    """The entries of a document that was read from `url`.

    Raises ArtifactError, which names the tensor, unless its pieces cover it exactly."""
    check_version(document, url)
    try:
        entries = {_name(name): _entry(value) for name, value in document["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{url}: not an index of tensors: {shown(error)}") from error
    for name, entry in entries.items():
        reason = fault(entry)
        if reason is not None:
            raise ArtifactError(f"{url}: tensor {name!r}: {reason}")
    return entries


def _name(name: str) -> str:
    # Names are printed on terminals and become names in converted files.
    if not name.isprintable():
        raise ValueError(f"{shown(name)} is not a name of a tensor")
    return name


def _entry(value: Any) -> TensorEntry:
    pieces = tuple(
        TensorPiece(
            text(p["file"]),
            text(p["key"]),
            counts(p["offset"]),
            counts(p["shape"]),
            text(p.get("digests", "")),
        )
        for p in value["pieces"]
    )
    return TensorEntry(text(value["dtype"]), counts(value["shape"]), pieces)


# --- exact cover ------------------------------------------------------------------------------


def fault(entry: TensorEntry) -> str | None:
    """Why the pieces are not an exact cover of the tensor; None when they are."""
    unfit = fault_of_spec(TensorSpec(entry.dtype, entry.shape))
    if unfit is not None:
        return unfit
    for piece in entry.pieces:
        if not PLAIN_FILE.fullmatch(piece.file):
            return (
                f"file name {shown(piece.file)} is not a plain NAME.safetensors in the step folder"
            )
        if len(piece.offset) != len(entry.shape) or len(piece.shape) != len(entry.shape):
            dims = f"{len(piece.shape)} dims, the tensor {len(entry.shape)}"
            return f"piece {shown(piece.key)} has {dims}"
        ends = [o + s for o, s in zip(piece.offset, piece.shape, strict=True)]
        if any(end > size for end, size in zip(ends, entry.shape, strict=True)):
            where = f"outside the tensor {list(entry.shape)}"
            return f"piece {shown(piece.key)} ends at {ends}, {where}"
        digits = num_digits(TensorSpec(entry.dtype, piece.shape))
        if piece.digests and len(piece.digests) != digits:
            held = f"{len(piece.digests)} digits of digests, not {digits}"
            return f"piece {shown(piece.key)} has {held}"
    try:
        pair = _overlap(entry.pieces)
    except OverflowError:
        return f"its {len(entry.pieces)} pieces are arranged as no layout of ranks does"
    if pair is not None:
        return f"pieces {shown(pair[0].key)} and {shown(pair[1].key)} overlap"
    covered = sum(math.prod(piece.shape) for piece in entry.pieces)
    if covered != math.prod(entry.shape) or not entry.pieces:
        return f"its pieces hold {covered} of {math.prod(entry.shape)} elements"
    return None


def _overlap(pieces: Sequence[TensorPiece]) -> tuple[TensorPiece, TensorPiece] | None:
    """Two pieces that share an element, found by a sweep along the dim with the most cuts.

    Raises OverflowError if too many overlap along it."""
    filled = [piece for piece in pieces if math.prod(piece.shape)]
    if len(filled) < 2:
        return None
    if not filled[0].shape:
        return filled[0], filled[1]
    import numpy as np  # takes 0.1 s: not needed while each tensor is in one file

    begins = np.array([piece.offset for piece in filled], np.int64)
    dim = max(range(begins.shape[1]), key=lambda d: len(np.unique(begins[:, d])))
    order = np.argsort(begins[:, dim], kind="stable")
    begins = begins[order]
    ends = begins + np.array([filled[k].shape for k in order], np.int64)
    # A piece is compared only from the first piece on that reaches beyond its start.
    reach = np.maximum.accumulate(ends[:, dim])
    first = np.searchsorted(reach, begins[:, dim], side="right")
    if (np.arange(len(filled)) - first).sum() > MAX_COMPARISONS * len(filled):
        raise OverflowError
    for at in np.flatnonzero(first < np.arange(len(filled))):
        near = slice(first[at], at)
        shared = ((begins[near] < ends[at]) & (ends[near] > begins[at])).all(axis=1)
        if shared.any():
            return filled[order[first[at] + int(shared.argmax())]], filled[order[at]]
    return None
