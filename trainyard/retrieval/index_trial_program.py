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

from trainyard.confinement import confine, leave_network
from trainyard.errors import ArtifactError
from trainyard.retrieval import index as faiss_index

BASE_BYTES = 4 << 30
"""Address space beyond that of the libraries, for the tables that faiss computes."""
VECTORS = 1024
NEIGHBORS = 5
STDIN = 0


def main() -> None:
    """Try the index; on an error, print it and exit with 1."""
    path, seconds = Path(sys.argv[1]), int(sys.argv[2])
    size = os.fstat(STDIN).st_size
    leave_network()
    confine(_address_space() + BASE_BYTES + 4 * size, seconds)
    try:
        index = faiss_index.load_from(STDIN, path)
        faiss_index.use(index, path, VECTORS, NEIGHBORS)
    except ArtifactError as error:
        os.write(1, str(error).encode())
        os._exit(1)
    os._exit(0)


def _address_space() -> int:
    """Memory of this process in bytes (libraries for GPUs use gigabytes); 0 if not reported."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
