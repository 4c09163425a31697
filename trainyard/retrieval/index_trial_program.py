"""The program that tries an index of faiss: it reads the file, adds some vectors and searches them.

    stdin    the file
    argv[1]  its path, for messages
    argv[2]  seconds of a processor that it may take
    stdout   why it is refused, with exit status 1

Before the first byte, the process gives up network, files and writes, and memory beyond a limit by
the size of the file. A crash ends this process alone."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import default_rng

from trainyard.confinement import confine, leave_network
from trainyard.errors import ArtifactError
from trainyard.retrieval import index as faiss_index

BASE_BYTES = 4 << 30
"""Address space beyond that of the libraries, for the tables that faiss computes."""
VECTORS = 1024
NEIGHBORS = 5
STDIN = 0
THROUGH_ALL = 4
"""Queries of a trial that are compared with all vectors: more would take time that grows with
their number times the file."""


def main() -> None:
    """Try the index; on an error, print it and exit with 1."""
    path, seconds = Path(sys.argv[1]), int(sys.argv[2])
    size = os.fstat(STDIN).st_size
    leave_network()
    confine(_address_space() + BASE_BYTES + 4 * size, seconds)
    try:
        index = faiss_index.load_from(STDIN, path)
        use(index, path)
    except ArtifactError as error:
        os.write(1, str(error).encode())
        os._exit(1)
    os._exit(0)


def use(index: Any, path: Path) -> None:
    """Add some vectors to the index of a file, and search for them.

    Raises ArtifactError if that fails."""
    with faiss_index.refusing(path):
        vectors = default_rng(0).standard_normal((VECTORS, index.d), np.float32)
        if faiss_index.facts(index).has_codes:
            faiss_index.add_codes(index, faiss_index.encode(index, vectors))
        elif not index.ntotal:  # some graphs are filled once
            faiss_index.add_vectors(index, vectors)
        lists = faiss_index.inverted_file(index)
        nprobe = int(lists.nlist) if lists else 1
        faiss_index.search(index, vectors[:THROUGH_ALL], NEIGHBORS, nprobe, VECTORS)
        if lists or faiss_index.is_graph(index):
            faiss_index.search(index, vectors, NEIGHBORS, 1, VECTORS)


def _address_space() -> int:
    """Memory of this process in bytes (libraries for GPUs use gigabytes); 0 if not reported."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
