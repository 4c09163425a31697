"""The shell between Slurm and torchrun under SIGTERM, in each shell that may be `sh`."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.backends.slurm.script import RANKS_SHELL

SHELLS = [["sh"], ["bash"], ["bash", "--posix"]]

NO_RANK = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)")
"""A launcher that has started nothing yet."""

WITH_RANK = """
import subprocess, sys, time
rank = subprocess.Popen(["sleep", sys.argv[1]])
print("up", flush=True)
rank.wait()
sys.exit(7)
"""

KILLED = 128 + signal.SIGKILL
LISTS_CHILDREN = any(Path("/proc/self/task").glob("*/children"))


@contextmanager
def started(shell: list[str], *launcher: str, delay: int = 0) -> Iterator[subprocess.Popen[str]]:
    """The shell with a launcher below it that has started."""
    text = RANKS_SHELL.format(delay=delay)
    command = [*shell, "-c", text, "trainyard", *launcher]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
@pytest.mark.parametrize("status", [0, 3])
def test_it_ends_as_its_launcher_does(shell: list[str], status: int) -> None:
    program = f"print('up', flush=True); raise SystemExit({status})"
    with started(shell, sys.executable, "-c", program) as process:
        assert process.wait(20) == status


@pytest.mark.skipif(not LISTS_CHILDREN, reason="this kernel lists no children")
@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_a_launcher_without_a_rank_ends_at_sigterm(shell: list[str]) -> None:
    with started(shell, *NO_RANK) as process:
        process.terminate()
        assert process.wait(20) == KILLED


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_a_launcher_with_a_rank_ignores_repeated_signals(shell: list[str]) -> None:
    with started(shell, sys.executable, "-c", WITH_RANK, "1.5") as process:
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)
        assert process.wait(20) == 7


def test_one_of_several_nodes_leaves_the_others_their_time() -> None:
    with started(["sh"], *NO_RANK, delay=1) as process:
        process.terminate()
        began = time.monotonic()
        assert process.wait(20) == KILLED
        assert time.monotonic() - began >= 0.9


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_the_shell_code_passes_shellcheck() -> None:
    text = RANKS_SHELL.format(delay=0)
    # It does not see that a trap calls a function.
    command = ["shellcheck", "--shell=sh", "--exclude=SC2317", "-"]
    found = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
