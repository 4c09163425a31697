"""Tries an index in a process of its own (index_trial_program): a forged one can crash faiss.

The process has no secret in its environment, but is no sandbox: whoever finds a hole in faiss runs
a program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from trainyard.errors import ArtifactError

PROGRAM = f"{__package__}.index_trial_program"
ROOT = str(Path(__file__).parents[2])
MESSAGE_BYTES = 1000
BASE_SECONDS = 30
BYTES_A_SECOND = 20 << 20


def try_index(path: Path) -> None:
    """Raise ArtifactError for a file that is no index, or that faiss cannot work with."""
    command = [sys.executable, "-s", "-P", "-B", "-m", PROGRAM, str(path.absolute())]
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    seconds = seconds_of(path)
    try:
        done = subprocess.run(
            [*command, str(seconds)],
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
        said = done.stdout[:MESSAGE_BYTES].decode("utf-8", "replace").strip()
        if done.returncode == 0:
            return
        if done.returncode == 1 and said:
            raise ArtifactError(said)
        reason = f"its reader ended with status {done.returncode}"
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            reason = "it takes more time or memory than a file of this size needs"
        elif done.returncode < 0:
            reason = f"faiss crashes on it, signal {-done.returncode}"
    raise ArtifactError(f"{path}: not an index of faiss, or a damaged one ({reason})")


def seconds_of(path: Path) -> int:
    """Time of a processor for a file of this size."""
    return BASE_SECONDS + path.stat().st_size // BYTES_A_SECOND
