"""Takes the memory of an index at once, before it is filled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.retrieval import index as faiss_index


def list_counts(index: Any, codes: faiss_index.Codes) -> NDArray[np.int64]:
    """How many of these vectors belong into each list; their number alone where there are none."""
    lists = faiss_index.inverted_file(index)
    if lists is None:
        return np.array([len(codes)])
    width = lists.coarse_code_size()
    numbers = np.zeros((len(codes), 8), np.uint8)
    numbers[:, :width] = codes[:, :width]
    return np.bincount(numbers.view("<i8")[:, 0], minlength=lists.nlist)


def reserve(index: Any, counts: NDArray[np.int64]) -> None:
    """Take the memory for this many more vectors in each list, as `list_counts` counts them.

    faiss appends to a list vector by vector, and doubles its memory whenever it is full."""
    lists = faiss_index.inverted_file(index)
    if lists is None:
        inner = faiss_index.innermost(index)
        codes, code_size = inner.codes, inner.code_size
        size = codes.size()
        codes.resize(size + int(counts[0]) * code_size)
        codes.resize(size)  # keeps the memory
        return
    held = lists.invlists
    for number in np.flatnonzero(counts).tolist():
        size = held.list_size(number)
        held.resize(number, size + int(counts[number]))
        held.resize(number, size)
