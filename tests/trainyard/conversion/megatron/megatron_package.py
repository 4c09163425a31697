"""Releases of megatron-core from the package index, each in a folder of its own for the tests of
one run. What a release needs beyond what is installed here is put beside it."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

BESIDE = ("psutil", "einops", "triton")


@functools.cache
def installed(version: str) -> Path:
    """The folder of a release; the test is skipped where it cannot be had."""
    folder = Path(tempfile.mkdtemp(prefix=f"megatron-core-{version}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Releases from 0.17 on are published for Python 3.11 and say that they need 3.12.
    options = ["--quiet", "--no-deps", "--ignore-requires-python", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *options, f"megatron-core=={version}"]
    done = subprocess.run([*command, *BESIDE], capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"megatron-core {version} cannot be installed: {done.stderr[-300:]}")
    return folder


def run(version: str, program: Path, words: Sequence[str], folder: Path | None = None) -> str:
    """What a program prints with a release, in a folder; it must end with 0."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(program), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        text=True,
        # Its fused functions are compiled for what is no GPU.
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(installed(version))},
        start_new_session=True,  # its save waits forever for a child that died
    )
    try:
        printed, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, printed[-3000:]
    return printed


def run_ranks(
    version: str, program: Path, words: Sequence[Sequence[str]], log: Path, seconds: float = 240
) -> None:
    """Run a program with a release on several ranks at once, each with its number and then its
    words; all must end with 0. log: gets what they print."""
    with log.open("wb") as out:
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(program), str(rank), *of_rank],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "TORCHDYNAMO_DISABLE": "1",
                    "PYTHONPATH": str(installed(version)),
                },
                start_new_session=True,  # its save waits forever for a child that died
            )
            for rank, of_rank in enumerate(words)
        ]
        try:
            end = time.monotonic() + seconds
            codes = [process.wait(max(1, end - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    assert set(codes) == {0}, log.read_text()[-3000:]
