"""The program that tries an index of faiss: it reads the file, adds some vectors and searches them.

    argv[1]  the file
    argv[2]  seconds of a processor that it may take
    stdout   why it is refused, with exit status 1

Memory is bounded by the size of the file. A crash ends this process alone."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from trainyard.errors import ArtifactError
from trainyard.retrieval import index as faiss_index

BASE_BYTES = 4 << 30
"""Address space beyond that of the libraries, for the tables that faiss computes."""
VECTORS = 1024
NEIGHBORS = 5


def main() -> None:
    """Try the index; on an error, print it and exit with 1."""
    path, seconds = Path(sys.argv[1]), int(sys.argv[2])
    _limit(resource.RLIMIT_AS, _address_space() + BASE_BYTES + 4 * path.stat().st_size)
    _limit(resource.RLIMIT_CPU, seconds)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    try:
        faiss_index.use(faiss_index.load(path), path, VECTORS, NEIGHBORS)
    except ArtifactError as error:
        os.write(1, str(error).encode())
        os._exit(1)
    os._exit(0)


def _address_space() -> int:
    """Bytes that are taken now; libraries for GPUs take some gigabytes. 0 where nothing tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def _limit(kind: int, wanted: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main()
