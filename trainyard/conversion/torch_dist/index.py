"""Reads the `.metadata` of torch's distributed checkpoint: its tensors, and the file and byte range
of each piece.

It is a pickle of torch's `Metadata`, or of Megatron-LM's class with the same fields. It maps the
name of a tensor (`fqn`) to its type, shape and boxes, and the name and offset of a box to its file,
first byte and length. `pickles` reads it. All of it is checked: file names stay in the folder,
boxes fill their tensor without gap or overlap, and no byte of a file belongs to two items."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.artifacts.strict_json import MAX_COUNT, MAX_DIMS
from trainyard.conversion.ranged_file import RangedFile
from trainyard.conversion.torch_save.file import TORCH_DTYPES
from trainyard.conversion.torch_save.pickles import Dtype, Recorded, unpickle
from trainyard.errors import ArtifactError

METADATA = ".metadata"

ALLOWED = ("torch.distributed.", "megatron.")
"""Classes that may be recorded; none is imported."""

LIMITS = {
    "nodes": 32_000_000,
    "memory_bytes": 6 * 2**30,
    "input_bytes": 512 * 2**20,
    "cpu_seconds": 280,
}
"""Enough for half a million pieces of about 45 values, far more than a large run writes."""

MAX_COMPARISONS = 10**8
"""Most pairs of a grid cell and a piece of a flat tensor: each cell is searched in all pieces."""

FILE = re.compile(r"[A-Za-z0-9_.-]+\.distcp")

Shape = tuple[int, ...]

Place = tuple[str, int, int]
"""File, first byte, bytes."""

Item = tuple[str, Shape | None, Place]
"""Name, offset of the box in the tensor of that name (None: a pickled object), position."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor, in a file of the folder."""

    offset: Shape
    shape: Shape
    file: str
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it is stored."""

    dtype: str
    """By torch's name."""
    shape: Shape
    pieces: tuple[StoredPiece, ...]
    unflattened: Shape | None = None
    """The real shape of a tensor that is stored as flat cells of a grid; `shape` is then the grid
    and the size of a cell (`nd_reformulated_orig_global_shape`)."""

    @property
    def logical_shape(self) -> Shape:
        """The real shape of the tensor."""
        return self.shape if self.unflattened is None else self.unflattened


@dataclass(frozen=True, slots=True)
class StoredIndex:
    """The content of a folder."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Place | None]
    """Positions of pickled objects, such as FP8 scales and random states, by name."""
    ends: Mapping[str, int]
    """Bytes that each file must have: the end of its last tensor or object."""
    network: str
    """How the process that read the pickle was kept from the network."""


def read_index(url: str) -> StoredIndex:
    """The index at the URL of a `.metadata`. Raises ArtifactError if it is hostile, truncated or
    of another kind."""
    file = RangedFile(url)
    try:
        if file.size_bytes > LIMITS["input_bytes"]:
            raise ArtifactError(
                f"{url}: has {file.size_bytes} bytes; the limit is {LIMITS['input_bytes']}"
            )
        data = bytes(file.range(0, file.size_bytes))
    finally:
        file.close()
    found = unpickle(data, url, allow=ALLOWED, limits=LIMITS)
    try:
        fields = _fields(found.tree, "Metadata", "MCoreMetadata")
        items = _items(fields.get("storage_data"))
        places = {(name, box): place for name, box, place in items if box is not None}
        ends = _ends(items)
        shapes = _original_shapes(fields.get("mcore_data"))
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, Place | None] = {}
        pickled = {name: place for name, box, place in items if box is None}
        for name, entry in _mapping(fields.get("state_dict_metadata")).items():
            if isinstance(entry, Recorded) and entry.source.endswith(".BytesStorageMetadata"):
                objects[str(name)] = pickled.get(str(name))
            else:
                tensors[str(name)] = _tensor(str(name), entry, places, shapes.get(str(name)))
    except ValueError as error:
        raise ArtifactError(f"{url}: is not the index of a checkpoint: {error}") from error
    return StoredIndex(tensors, objects, ends, found.network)


# --- fields, each checked -------------------------------------------------------------------------


def _fields(node: Any, *classes: str) -> Mapping[str, Any]:
    """The state of an object that must be of one of these classes."""
    name = node.source.rpartition(".")[2] if isinstance(node, Recorded) else type(node).__name__
    if not isinstance(node, Recorded) or name not in classes:
        raise ValueError(f"found a {name}, wanted {' or '.join(classes)}")
    return _mapping(node.state)


def _mapping(node: Any) -> Mapping[Any, Any]:
    if not isinstance(node, Mapping):
        raise ValueError(f"found a {type(node).__name__}, wanted a table")
    return node


def _counts(node: Any) -> Shape:
    """A shape or an offset."""
    is_list = isinstance(node, tuple | list) and len(node) <= MAX_DIMS
    if not is_list or any(type(n) is not int or not 0 <= n <= MAX_COUNT for n in node):
        raise ValueError(f"found {node!r:.60}, wanted a shape")
    return tuple(node)


def _items(node: Any) -> list[Item]:
    """All items of the files, including pickled objects."""
    items: list[Item] = []
    for key, entry in _mapping(node).items():
        index, place = _fields(key, "MetadataIndex"), _fields(entry, "_StorageInfo")
        name, offset = str(index.get("fqn")), index.get("offset")
        file, begin, length = (place.get(k) for k in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not FILE.fullmatch(file):
            raise ValueError(f"{file!r:.80} is not the name of a file in its folder")
        least = 0 if offset is None else 1  # an object may be empty
        if type(begin) is not int or type(length) is not int or begin < 0 or length < least:
            raise ValueError(f"{length!r:.20} bytes from {begin!r:.20} on are no range of {file}")
        if offset is not None and place.get("transform_descriptors"):
            raise ValueError(f"{file} is compressed or encrypted, which this version cannot read")
        box = None if offset is None else _counts(offset)
        items.append((name, box, (file, begin, length)))
    return items


def _ends(items: Iterable[Item]) -> dict[str, int]:
    """The least size of each file. Raises ValueError for two items that share a byte, as one would
    then be read as the other."""
    ends: dict[str, int] = {}
    last: dict[str, str] = {}
    for name, _, (file, begin, length) in sorted(items, key=lambda item: item[2]):
        if length and begin < ends.get(file, 0):
            raise ValueError(
                f"{last[file]!r:.80} and {name!r:.80} share the bytes of {file} from {begin} on"
            )
        ends[file] = max(begin + length, ends.get(file, 0))
        last[file] = name
    return ends


def _original_shapes(node: Any) -> dict[str, Shape]:
    """Shapes of the tensors that are stored as pieces of flat vectors."""
    found = {}
    key = "nd_reformulated_orig_global_shape"
    for name, entry in node.items() if isinstance(node, Mapping) else ():
        shape = entry.get(key) if isinstance(entry, Mapping) else None
        if shape is not None:
            found[str(name)] = _counts(shape)
    return found


def _tensor(
    name: str,
    node: Any,
    places: Mapping[tuple[str, Shape], Place],
    unflattened: Shape | None,
) -> StoredTensor:
    fields = _fields(node, "TensorStorageMetadata")
    shape, pieces = _counts(fields.get("size")), []
    for chunk in fields.get("chunks") or ():
        box = _fields(chunk, "ChunkStorageMetadata")
        offset, size = _counts(box.get("offsets")), _counts(box.get("sizes"))
        if (name, offset) not in places:
            raise ValueError(f"the piece of {name} at {list(offset)} is in no file")
        pieces.append(StoredPiece(offset, size, *places[name, offset]))
    if not fills([(p.offset, p.shape) for p in pieces], (0,) * len(shape), shape):
        raise ValueError(f"the pieces of {name} do not fill its shape {list(shape)}")
    if unflattened is not None:
        _check_grid(name, shape, unflattened, len(pieces))
    return StoredTensor(_dtype(name, fields.get("properties")), shape, tuple(pieces), unflattened)


def _dtype(name: str, node: Any) -> str:
    """The type in TensorProperties: a tuple that begins with it, or a table in old releases."""
    state = node.state if isinstance(node, Recorded) else None
    found = state[0] if isinstance(state, tuple) and state else None
    if isinstance(state, Mapping):
        found = state.get("dtype")
    if not isinstance(found, Dtype) or found.name not in TORCH_DTYPES:
        raise ValueError(f"{name} has a type that this version cannot read")
    return found.name


def _check_grid(name: str, shape: Shape, unflattened: Shape, num_pieces: int) -> None:
    grid = shape[:-1]
    fits = len(grid) == len(unflattened) and math.prod(shape) == math.prod(unflattened)
    fits = fits and math.prod(grid) * num_pieces <= MAX_COMPARISONS
    if not fits or any(n % parts for n, parts in zip(unflattened, grid, strict=True) if parts):
        raise ValueError(f"{name} has shape {list(unflattened)}, but is stored as {list(shape)}")


# --- boxes ------------------------------------------------------------------------------------


def fills(boxes: Sequence[tuple[Shape, Shape]], begin: Shape, size: Shape) -> bool:
    """Whether boxes (offset, shape) fill a box without gap or overlap.

    Along some dim they must form consecutive slabs, each filled in the same way. Any sharding by
    ranks does."""
    if any(len(offset) != len(size) or len(shape) != len(size) for offset, shape in boxes):
        return False
    if 0 in size:
        return True
    if len(boxes) == 1:
        return boxes[0] == (begin, size)
    for dim in range(len(size)):
        slabs: dict[tuple[int, int], list[tuple[Shape, Shape]]] = defaultdict(list)
        for offset, shape in boxes:
            slabs[offset[dim], shape[dim]].append((offset, shape))
        if len(slabs) > 1 and _follow(sorted(slabs), begin[dim], size[dim]):
            return all(
                fills(inside, _with(begin, dim, start), _with(size, dim, length))
                for (start, length), inside in slabs.items()
            )
    return False


def _follow(intervals: Iterable[tuple[int, int]], begin: int, size: int) -> bool:
    at = begin
    for start, length in intervals:
        if start != at or length == 0:
            return False
        at += length
    return at == begin + size


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])
