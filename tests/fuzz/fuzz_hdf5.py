"""Any HDF5 file gives the array that it holds, or an ArtifactError."""

from __future__ import annotations

import io

import atheris
from common import fuzz, only

with atheris.instrument_imports(include=["trainyard.retrieval"]):
    from trainyard.retrieval import hdf5_arrays

import h5py
import numpy as np

from trainyard.errors import ArtifactError


def small(libver: str | None, others: int) -> bytes:
    """A file with an array `data`, and others."""
    file = io.BytesIO()
    with h5py.File(file, "w", libver=libver) as written:
        written["data"] = np.ones((3, 4), np.float32)
        for number in range(others):
            written[f"other {number}"] = np.ones((2, 2), np.uint32)
    return file.getvalue()


SEEDS = (small(None, 0), small("latest", 0), small(None, 9), small("latest", 3))


def target(data: bytes) -> None:
    with only(ArtifactError):
        found = hdf5_arrays.find_array(io.BytesIO(data), len(data), "data", "a.hdf5")
        values = found.within(data)
        assert values.shape == found.shape
        assert values.nbytes <= len(data)
        values.sum(dtype=np.float64)


if __name__ == "__main__":
    fuzz(target, SEEDS)
