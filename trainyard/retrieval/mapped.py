"""Arrays of HDF5 files, mapped: a read costs no call of HDF5, and works after a fork."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts import store
from trainyard.corpus.indexed import CacheOptions
from trainyard.corpus.remote import fetch_whole
from trainyard.errors import ArtifactError


def map_array(
    url: str, name: str, columns: int, what: str, options: CacheOptions | None = None
) -> NDArray[Any]:
    """An array of two dimensions of a local or remote HDF5 file; remote ones are copied to this
    node once. what: the file for messages, such as 'a chunk database'."""

    def open_file(path: Path) -> NDArray[Any]:
        with h5py.File(path, "r") as file:
            values = file[name]
            if values.ndim != 2 or values.shape[1] != columns:
                raise ArtifactError(f"{url}: {name} is {values.shape}, not (n, {columns})")
            offset, dtype, shape = values.id.get_offset(), values.dtype, values.shape
            if offset is None:  # empty, or not contiguous as another program wrote it
                return np.asarray(values[()])
        return np.asarray(np.memmap(path, dtype, "r", offset, shape))

    path = store.local_path(url)
    try:
        if path is None:
            return fetch_whole(url, options or CacheOptions(), open_file)
        return open_file(path)
    except (OSError, KeyError) as error:
        raise ArtifactError(f"{url}: not {what}, or damaged: {error}") from None
