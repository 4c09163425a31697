"""A server in a process of its own, for benchmarks that are its clients."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

LOOK_SECONDS = 0.1
END_SECONDS = 60


def pinned(cores: set[int], *arguments: str) -> list[str]:
    """The command of a stage on some cores, with one thread of torch."""
    cpus = ",".join(map(str, sorted(cores)))
    python = ["taskset", "--cpu-list", cpus, "env", "OMP_NUM_THREADS=1", sys.executable]
    return [*python, "-m", *arguments]


def run(command: list[str]) -> None:
    """Run a command to its end; RuntimeError, with what it printed, if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")


@contextmanager
def served(command: list[str]) -> Iterator[tuple[str, int]]:
    """The address of a server on a free port, and its process. RuntimeError, with what it logged,
    if it ends by itself, not with status 0, or not at all and so is killed; what its client raised
    is the cause."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen([*command, "--port", "0"], stdout=out, stderr=out)
        try:
            yield _address(process, log), process.pid
        finally:
            if fault := _end(process):
                raise RuntimeError(f"{fault}:\n{log.read_text()[-4000:]}") from sys.exception()


def _end(process: subprocess.Popen[bytes]) -> str | None:
    """End a server, and say what was wrong with that."""
    if process.poll() is not None:
        return f"the server ended by itself with {process.returncode}"
    process.terminate()
    try:
        status = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"the server did not end within {END_SECONDS} s of SIGTERM, and was killed"
    return f"the server ended with {status}" if status else None


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        if found := re.search(r"is served at (http://\S+)", log.read_text()):
            return found[1]
        time.sleep(LOOK_SECONDS)
    raise RuntimeError("the server did not say where it serves")
