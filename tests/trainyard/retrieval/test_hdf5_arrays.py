"""Arrays found in HDF5 files are those that the library reads."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from trainyard.errors import ArtifactError
from trainyard.retrieval.hdf5_arrays import find_array

FORMATS = [None, "earliest", "v108", "v110", "latest"]
SHAPES: list[tuple[int, ...]] = [(), (1,), (3, 5), (0, 4), (2, 3, 4)]


def read(data: bytes, name: str) -> NDArray[Any]:
    return find_array(io.BytesIO(data), len(data), name, "here.hdf5").within(data)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("libver", FORMATS)
def test_arrays_are_those_that_were_written(
    libver: str | None, shape: tuple[int, ...], tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    arrays = {t: rng.integers(0, 99, shape).astype(t) for t in ("float32", "uint32", "uint64")}
    with h5py.File(tmp_path / "a", "w", libver=libver) as file:
        for name, values in arrays.items():
            file[name] = values
            file[name].attrs["unit"] = "none"
    data = (tmp_path / "a").read_bytes()
    if libver in ("v108", "v110", "latest") and shape == ():
        with pytest.raises(ArtifactError, match="single value"):
            read(data, "float32")
        return
    for name, values in arrays.items():
        found = read(data, name)
        assert found.dtype == name
        assert found.shape == shape
        assert (found == values).all()


def test_names_of_a_large_group_lie_in_a_tree(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        for i in range(30):
            file[f"array {i}"] = np.full((2, 2), i, np.uint32)
    data = (tmp_path / "a").read_bytes()
    assert [int(read(data, f"array {i}")[0, 0]) for i in range(30)] == list(range(30))
    with pytest.raises(ArtifactError, match=r"here\.hdf5: no array 'array 30'.*of this name"):
        read(data, "array 30")


@pytest.mark.parametrize("libver", [None, "latest"])
def test_damaged_bytes_give_an_array_or_a_refusal(libver: str | None, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w", libver=libver) as file:
        file["data"] = np.ones((20, 4), np.float32)
    whole = (tmp_path / "a").read_bytes()
    refused = 0
    for seed in range(2000):
        rng = random.Random(seed)
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3])):
            value = rng.choice([0, 1, 2**31 - 1, 2**64 - 1, rng.randrange(len(data))])
            place = rng.randrange(1000) if rng.random() < 0.9 else rng.randrange(len(data))
            data[place : place + 8] = value.to_bytes(8, "little")
        end = rng.randrange(len(data)) if rng.random() < 0.1 else len(data)
        try:
            read(bytes(data[:end]), "data").sum()
        except ArtifactError:
            refused += 1
    assert refused > 100
