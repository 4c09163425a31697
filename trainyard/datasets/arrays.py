"""Arrays as files: numpy's .npy, written as a stream and mapped into memory."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts.digest import hasher
from trainyard.artifacts.store import OutputFile
from trainyard.errors import ArtifactError

CHUNK = 1 << 20
"""Array elements handled at a time."""


def digest_array(array: NDArray[Any], dtype: str) -> str:
    """The digest of an array's length and values, for any place and storage type."""
    running = hasher()
    for start in range(0, len(array), CHUNK):
        piece = np.ascontiguousarray(array[start : start + CHUNK], dtype)
        running.update(piece.view(np.uint8))
    return f"{len(array)}:{running.hexdigest()}"


def write_array(out: OutputFile, array: NDArray[Any]) -> None:
    """An array in numpy's .npy format, version 1.0, little endian, rows in order."""
    stored = array.dtype.newbyteorder("<")
    header = BytesIO()
    described = {"descr": stored.str, "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(header, described)
    out.write(header.getvalue())
    for start in range(0, len(array), CHUNK):
        out.write(np.ascontiguousarray(array[start : start + CHUNK], stored).view(np.uint8))


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
