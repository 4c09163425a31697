"""Arrays of HDF5 files, mapped: a read opens nothing, and works after a fork."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from trainyard.artifacts import store
from trainyard.corpus.indexed import CacheOptions
from trainyard.corpus.remote import fetch_whole
from trainyard.errors import ArtifactError
from trainyard.retrieval.hdf5_arrays import find_array


def map_array(
    url: str, name: str, dtype: str, columns: int, what: str, options: CacheOptions | None = None
) -> NDArray[Any]:
    """An array of two dimensions of a local or remote HDF5 file; remote ones are copied to this
    node once. what: the file for messages, such as 'a chunk database'."""

    def open_file(path: Path) -> NDArray[Any]:
        with path.open("rb") as file:
            found = find_array(file, path.stat().st_size, name, url)
            if found.dtype != dtype or len(found.shape) != 2 or found.shape[1] != columns:
                raise ArtifactError(
                    f"{url}: {name} holds {found.dtype} of shape {found.shape}, not {dtype} of "
                    f"shape (n, {columns})"
                )
            return found.mapped(file)

    path = store.local_path(url)
    if path is None:
        return fetch_whole(url, options or CacheOptions(), open_file)
    try:
        return open_file(path)
    except OSError as error:
        raise ArtifactError(f"{url}: not {what}, or damaged: {error}") from None
