"""Compares two checkpoints: tensors by name, in any layout, and documents by key. Keeps only slices
of one tensor in memory.

Equal means equal bit for bit. Differences are of the values as 64-bit floats: the largest absolute
one, and the largest relative one, |a - b| / max(|a|, |b|), which is 2 at most. A NaN where the
other has a number, and an infinity where it has a finite one, differ by infinity."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainyard.checkpoint.load import Checkpoint
from trainyard.checkpoint.safetensors.header import Extent, TensorSpec
from trainyard.checkpoint.safetensors.ranges import Want, cut
from trainyard.checkpoint.steps import CONFIG, INDEX, STATE

SLICE_ELEMENTS = 1 << 20
"""Elements compared at once: 8 MiB as 64-bit floats, about ten times that in all."""

DOCUMENTS = (STATE, CONFIG)


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest difference, the index of its element in the whole tensor, and both values."""

    difference: float
    index: tuple[int, ...]
    ours: float
    theirs: float


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs."""

    name: str
    ours: TensorSpec | None
    """None: only the other has it."""
    theirs: TensorSpec | None
    differing: int = 0
    """Number of differing elements, for tensors of equal shape; bit for bit if of equal type."""
    absolute: Largest | None = None
    relative: Largest | None = None


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """A key of a document that differs. A missing value is None."""

    document: str
    key: str
    ours: Any
    theirs: Any
    only_in: str | None = None
    """"ours" or "theirs"; None for a key that both have."""


def compare_tensors(
    ours: Checkpoint,
    theirs: Checkpoint,
    matches: Callable[[str], bool] = lambda name: True,
    advance: Callable[[int], object] = lambda size_bytes: None,
) -> Iterator[TensorDifference]:
    """Differences of the tensors whose name matches, by name. Calls `advance` with the bytes of
    each tensor."""
    for name in sorted(ours.index.keys() | theirs.index.keys()):
        if not matches(name):
            continue
        a, b = (side.spec(name) if name in side.index else None for side in (ours, theirs))
        found = TensorDifference(name, a, b)
        if a is not None and b is not None and a.shape == b.shape:
            found = _compare_values(ours, theirs, name)
        if found.differing or a != b:
            yield found
        advance(a.size_bytes if a is not None else 0)


def _compare_values(ours: Checkpoint, theirs: Checkpoint, name: str) -> TensorDifference:
    a, b = ours.spec(name), theirs.spec(name)
    differing, absolute, relative = 0, None, None
    for offset, shape in slices(a.shape):
        x, y = ours.read_slice(name, offset, shape), theirs.read_slice(name, offset, shape)
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            continue
        unequal = _unequal(x, y).view(shape)
        differing += int(unequal.sum())
        p, q = x.to(torch.float64), y.to(torch.float64)
        apart = _apart(p, q)
        apart[~unequal] = -1.0  # so that the maximum is at an element that differs
        scale = torch.maximum(p.abs(), q.abs())
        part = torch.where(apart > 0, (apart / scale).nan_to_num(nan=math.inf), apart)
        absolute = _larger(absolute, apart, p, q, offset)
        relative = _larger(relative, part, p, q, offset)
    if not differing:
        return TensorDifference(name, a, b)
    return TensorDifference(name, a, b, differing, absolute, relative)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Bytes, with a last dim for those of an element."""
    return x.reshape(-1, 1).view(torch.uint8)


def _unequal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dtype == y.dtype:
        return (_bits(x) != _bits(y)).any(dim=1)
    p, q = x.to(torch.float64), y.to(torch.float64)
    return (p != q) & ~(p.isnan() & q.isnan())


def _apart(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """|p - q|; 0 where both are the same infinity or both NaN."""
    same = (p == q) | (p.isnan() & q.isnan())
    return torch.where(same, 0.0, (p - q).abs().nan_to_num(nan=math.inf, posinf=math.inf))


def _larger(
    before: Largest | None,
    apart: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    offset: Sequence[int],
) -> Largest:
    at = int(apart.reshape(-1).argmax())
    difference = float(apart.reshape(-1)[at])
    if before is not None and before.difference >= difference:
        return before
    local = torch.unravel_index(torch.tensor(at), apart.shape) if apart.dim() else ()
    index = tuple(o + int(i) for o, i in zip(offset, local, strict=True))
    return Largest(difference, index, float(p.reshape(-1)[at]), float(q.reshape(-1)[at]))


def slices(
    shape: Sequence[int], most: int = SLICE_ELEMENTS
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of a tensor, as (offset, shape), of at most `most` elements each."""
    extent = Extent(TensorSpec("U8", tuple(shape)), 0)
    whole = Want(extent, (0,) * len(shape), tuple(shape), None)
    for part in cut(whole, most, 0):
        yield part.local, part.shape


# --- documents ------------------------------------------------------------------------------------


def compare_documents(ours: Checkpoint, theirs: Checkpoint) -> Iterator[KeyDifference]:
    """Differences of state.json and config.json, by key, and of other files without tensors
    (tokenizer, ledger), by digest."""
    for name in DOCUMENTS:
        one, other = (_flat(side.document(name)) for side in (ours, theirs))
        yield from _by_key(name, _without_empty(one, other), _without_empty(other, one))
    yield from _by_key("files", *(_other_files(side) for side in (ours, theirs)))


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A document as `a.b.c` to value; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _without_empty(flat: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Without empty tables that are not empty in the other document, whose keys show the
    difference."""
    tables = {key[: at.start()] for key in other for at in re.finditer(r"\.", key)}
    return {key: value for key, value in flat.items() if value != {} or key not in tables}


def _other_files(checkpoint: Checkpoint) -> dict[str, str]:
    others = {INDEX, *DOCUMENTS, *checkpoint.files.names}
    files = (file for file in checkpoint.manifest.files if not file.volatile)
    return {file.path: file.digest for file in files if file.path not in others}


def _by_key(
    document: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[KeyDifference]:
    for key in sorted(ours.keys() | theirs.keys()):
        if key not in theirs:
            yield KeyDifference(document, key, ours[key], None, "ours")
        elif key not in ours:
            yield KeyDifference(document, key, None, theirs[key], "theirs")
        elif ours[key] != theirs[key] or type(ours[key]) is not type(theirs[key]):
            yield KeyDifference(document, key, ours[key], theirs[key])
