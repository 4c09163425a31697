"""Arrays as files: numpy's .npy, written as a stream and mapped into memory.

Arrays may come in pieces, so that large ones never lie in memory whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts.digest import hasher
from trainyard.artifacts.store import OutputFile
from trainyard.errors import ArtifactError

CHUNK = 1 << 20
"""Array elements handled at a time."""

Arrays: TypeAlias = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Arrays, piece by piece."""

    shapes: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
    """Type and shape of each array."""
    make: Callable[[], Iterator[Arrays]]
    """The pieces in order, each with the next rows of each array; made anew by each call."""
    in_memory: Arrays | None = None
    """The arrays, if they lie in memory anyway."""

    @classmethod
    def of(cls, arrays: Arrays) -> Pieces:
        """One piece."""
        shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        return cls(shapes, lambda: iter([arrays]), arrays)

    def whole(self) -> Arrays:
        """The arrays in memory."""
        if self.in_memory is not None:
            return self.in_memory
        made = {name: np.empty(shape, dtype) for name, (dtype, shape) in self.shapes.items()}
        filled = dict.fromkeys(made, 0)
        for piece in self.make():
            for name, rows in piece.items():
                made[name][filled[name] : filled[name] + len(rows)] = rows
                filled[name] += len(rows)
        return made


def digest_array(array: NDArray[Any], dtype: str) -> str:
    """The digest of an array's length and values, for any place and storage type."""
    running = hasher()
    for start in range(0, len(array), CHUNK):
        piece = np.ascontiguousarray(array[start : start + CHUNK], dtype)
        running.update(piece.view(np.uint8))
    return f"{len(array)}:{running.hexdigest()}"


def write_header(out: OutputFile, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """The header of numpy's .npy format, version 1.0, for little endian rows in order."""
    header = BytesIO()
    described = {"descr": _stored(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    out.write(header.getvalue())


def write_rows(out: OutputFile, array: NDArray[Any]) -> None:
    """The next rows of an array, after its header."""
    stored = _stored(array.dtype)
    for start in range(0, len(array), CHUNK):
        out.write(np.ascontiguousarray(array[start : start + CHUNK], stored).view(np.uint8))


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def map_array(path: Path) -> NDArray[Any]:
    """A .npy file mapped into memory, read-only."""
    try:
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("not version 1.0")
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
        if fortran_order or dtype.hasobject:
            raise ValueError("not a plain array")
        if 0 in shape:  # mmap refuses an empty range
            return np.empty(shape, dtype)
        # As a plain array: taking an element of a memmap costs three times as much.
        return np.asarray(np.memmap(path, dtype, "r", offset, shape))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: not an array of the index cache ({error})") from error
