"""Rows grouped by a key in bounded memory: spread over files by the key, then sorted one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainyard.collection.duplicates.minhash import Array

PARTITION_BYTES = 64 << 20
MOST_PARTITIONS = 512


class Spill:
    """Rows of u64; the first `num_keys` columns are the key, spread evenly."""

    def __init__(self, folder: Path, columns: int, num_keys: int, expected_rows: int) -> None:
        """expected_rows: decides the number of files alone."""
        self._columns, self._num_keys = columns, num_keys
        needed = -(-expected_rows * columns * 8 // PARTITION_BYTES)
        self._count = min(max(needed, 1), MOST_PARTITIONS)
        folder.mkdir()
        self._paths = [folder / f"{i:03d}" for i in range(self._count)]
        self._buffers: list[list[Array]] = [[] for _ in self._paths]
        self._buffered = 0

    def add(self, rows: Array) -> None:
        """rows: (n, columns)."""
        rows = np.ascontiguousarray(rows, np.uint64)
        owners = rows[:, 0] % np.uint64(self._count)
        for i in range(self._count):
            if len(chosen := rows[owners == i] if self._count > 1 else rows):
                self._buffers[i].append(chosen)
        self._buffered += rows.nbytes
        if self._buffered >= PARTITION_BYTES:
            self._flush()

    def _flush(self) -> None:
        for path, buffer in zip(self._paths, self._buffers, strict=True):
            if buffer:
                with path.open("ab") as file:
                    for rows in buffer:
                        file.write(rows.data)
                buffer.clear()
        self._buffered = 0

    def groups(self) -> Iterator[tuple[Array, Array]]:
        """(rows, bounds) of each file: rows sorted by key and then by all other columns; group g is
        rows[bounds[g]:bounds[g + 1]], and only groups of several rows are there."""
        self._flush()
        for path in self._paths:
            if not path.exists():
                continue
            rows = np.fromfile(path, np.uint64).reshape(-1, self._columns)
            path.unlink()
            rows = _repeated(rows)
            rows = rows[np.lexsort(rows.T[::-1])]
            keys = rows[:, : self._num_keys]
            same = (keys[1:] == keys[:-1]).all(axis=1)
            kept = np.zeros(len(rows), np.bool_)
            kept[1:] |= same
            kept[:-1] |= same
            if not kept.any():
                continue
            starts = np.concatenate(([True], ~same))[kept]
            bounds = np.append(np.flatnonzero(starts), int(kept.sum()))
            yield rows[kept], bounds


def _repeated(rows: Array) -> Array:
    """The rows whose first column is that of another row: mostly few, and to sort all rows by all
    columns takes ten times as long."""
    order = np.argsort(rows[:, 0])
    first = rows[order, 0]
    same = first[1:] == first[:-1]
    kept = np.zeros(len(rows), np.bool_)
    kept[order[1:][same]] = True
    kept[order[:-1][same]] = True
    return rows[kept]
