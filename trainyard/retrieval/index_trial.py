"""Tries an index of faiss in a process of its own, since a forged one can crash faiss.

The process reads the file, adds some vectors and searches them; what it cannot do is refused. It
bounds memory and time by the size of the file. It has no secret in its environment, but is no
sandbox: whoever finds a hole in faiss runs a program."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from trainyard.errors import ArtifactError

ROOT = str(Path(__file__).parents[2])
BASE_BYTES = 4 << 30
"""Address space of Python, numpy and faiss."""
BASE_SECONDS = 30
BYTES_A_SECOND = 20 << 20
VECTORS = 1024
"""Vectors that are added and searched."""
NEIGHBORS = 5
MESSAGE_BYTES = 1000


def try_index(path: Path) -> None:
    """Raise ArtifactError for a file that is no index, or that faiss cannot work with."""
    command = [sys.executable, "-s", "-P", "-B", "-m", __name__, str(path.absolute())]
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    seconds = BASE_SECONDS + path.stat().st_size / BYTES_A_SECOND
    try:
        done = subprocess.run(
            command,
            cwd="/",
            env={**kept, **one, "PYTHONPATH": ROOT},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=4 * seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = "it takes too long to read"
    else:
        if done.returncode == 0:
            return
        said = done.stdout[:MESSAGE_BYTES].decode("utf-8", "replace").strip()
        reason = f"its reader ended with status {done.returncode}"
        if said and done.returncode == 1:
            raise ArtifactError(said)
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            reason = "it takes more time or memory than a file of this size needs"
        elif done.returncode < 0:
            reason = f"faiss crashes on it, signal {-done.returncode}"
    raise ArtifactError(f"{path}: not an index of faiss, or a damaged one ({reason})")


def main() -> None:
    """Read and use the index of argv[1]; on an error, print it and exit with 1."""
    path = Path(sys.argv[1])
    size = path.stat().st_size
    _limit(resource.RLIMIT_AS, BASE_BYTES + 4 * size)
    _limit(resource.RLIMIT_CPU, BASE_SECONDS + size // BYTES_A_SECOND)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    # After the limits: the import is a part of what they bound.
    from trainyard.retrieval import index as faiss_index

    try:
        faiss_index.use(faiss_index.load(path), path, VECTORS, NEIGHBORS)
    except ArtifactError as error:
        os.write(1, str(error).encode()[:MESSAGE_BYTES])
        os._exit(1)
    os._exit(0)


def _limit(kind: int, wanted: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main()
