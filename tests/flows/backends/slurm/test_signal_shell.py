"""The shell between Slurm and torchrun under signals, in each shell that may be `sh`."""

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
import signal, subprocess, sys
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, print)  # the rank has the default, as one whose stage has begun
rank = subprocess.Popen(["sleep", sys.argv[1]])
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
print("up", flush=True)
rank.wait()
sys.exit(int(sys.argv[2]))
"""
WITH_NEW_RANK = """
import subprocess
rank = subprocess.Popen(["sleep", "60"])
print("up", flush=True)
rank.wait()
"""
"""A launcher whose rank still ignores what it inherited."""

KILLED = 128 + signal.SIGKILL
WARNED = 128 + signal.SIGUSR1
SIGNALS = [(signal.SIGTERM, KILLED), (signal.SIGUSR1, WARNED)]
LISTS_CHILDREN = any(Path("/proc/self/task").glob("*/children"))


@contextmanager
def started(shell: list[str], *launcher: str, delay: int = 0) -> Iterator[subprocess.Popen[str]]:
    """The shell with a launcher below it that has started."""
    text = RANKS_SHELL.format(delay=delay)
    command = [*shell, "-c", text, "trainyard", *launcher]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
@pytest.mark.parametrize("status", [0, 3])
def test_it_ends_as_its_launcher_does(shell: list[str], status: int) -> None:
    program = f"print('up', flush=True); raise SystemExit({status})"
    with started(shell, sys.executable, "-c", program) as process:
        assert process.wait(20) == status


@pytest.mark.few_cases(3)
@pytest.mark.skipif(not LISTS_CHILDREN, reason="this kernel lists no children")
@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
@pytest.mark.parametrize(("number", "status"), SIGNALS)
@pytest.mark.parametrize(
    "launcher", [NO_RANK, (sys.executable, "-c", WITH_NEW_RANK)], ids=["no rank", "a new rank"]
)
def test_a_launcher_whose_stage_has_not_begun_ends_at_once(
    shell: list[str], number: signal.Signals, status: int, launcher: tuple[str, ...]
) -> None:
    with started(shell, *launcher) as process:
        process.send_signal(number)
        assert process.wait(20) == status


def test_a_rank_that_sigusr1_ends_counts_as_warned() -> None:
    with started(["sh"], sys.executable, "-c", WITH_RANK, "0.2", "1") as process:
        process.send_signal(signal.SIGUSR1)
        assert process.wait(20) == WARNED


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_a_launcher_with_a_rank_ignores_repeated_signals(shell: list[str]) -> None:
    with started(shell, sys.executable, "-c", WITH_RANK, "1.5", "0") as process:
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)
        assert process.wait(20) == 0


@pytest.mark.slow
def test_one_of_several_nodes_leaves_the_others_their_time() -> None:
    with started(["sh"], *NO_RANK, delay=1) as process:
        process.terminate()
        began = time.monotonic()
        assert process.wait(20) == KILLED
        assert time.monotonic() - began >= 0.9


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_the_shell_code_passes_shellcheck() -> None:
    text = RANKS_SHELL.format(delay=0)
    # It does not see that a trap calls a function; $ranks are words on purpose.
    command = ["shellcheck", "--shell=sh", "--exclude=SC2317,SC2086", "-"]
    found = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
