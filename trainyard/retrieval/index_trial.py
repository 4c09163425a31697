"""Tries an index in a process of its own (index_trial_program): a forged one can crash faiss.

The process is confined (trainyard/confinement.py) and has no secret in its environment, but is no
sandbox: whoever finds a hole in faiss runs a program in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trainyard.confinement import answer_of, environment, is_out_of_time
from trainyard.errors import ArtifactError

PROGRAM = f"{__package__}.index_trial_program"
MESSAGE_BYTES = 1000
BASE_SECONDS = 30
BYTES_A_SECOND = 20 << 20


def try_index(path: Path) -> None:
    """Raise ArtifactError for a file that is no index, or that faiss cannot work with."""
    seconds = seconds_of(path)
    command = [sys.executable, "-s", "-P", "-B", "-m", PROGRAM, str(path), str(seconds)]
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with path.open("rb") as file:
        process = subprocess.Popen(
            command,
            cwd="/",
            env={**environment(), **one},
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        said = answer_of(process, 4 * seconds, MESSAGE_BYTES).decode("utf-8", "replace").strip()
    status = process.returncode
    if status == 0:
        return
    if status == 1 and said:
        raise ArtifactError(said[:MESSAGE_BYTES])
    reason = f"its reader ended with status {status}"
    if is_out_of_time(status):
        reason = "it takes more time or memory than a file of this size needs"
    elif status < 0:
        reason = f"faiss crashes on it, signal {-status}"
    raise ArtifactError(f"{path}: not an index of faiss, or a damaged one ({reason})")


def seconds_of(path: Path) -> int:
    """Time of a processor for a file of this size."""
    return BASE_SECONDS + path.stat().st_size // BYTES_A_SECOND
