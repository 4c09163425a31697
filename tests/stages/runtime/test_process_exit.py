"""A rank of several ends at once, with everything that it owes done."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, types
from stages.runtime.process_exit import exit_now, is_one_of_several
{setup}
sys.stdout.write("said")
atexit.register(print, " last word")
hanging = threading.Thread(target=threading.Event().wait)
hanging.start()
assert is_one_of_several()
exit_now({status})
"""
LOADED = 'sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")'


def left(status: int, setup: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(status=status, setup=f"{LOADED}\n{setup}")],
        env={"WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize("status", [0, 3, 143])
def test_output_and_exit_functions_run_first_and_threads_are_not_joined(status: int) -> None:
    process = left(status)
    assert (process.returncode, process.stdout, process.stderr) == (status, "said last word\n", "")


def test_output_that_cannot_be_written_is_a_failure() -> None:
    process = left(0, "sys.stdout = open('/dev/full', 'w')")
    assert process.returncode == 70
    assert "No space left on device" in process.stderr


@pytest.mark.parametrize("world_size", ["1", None])
def test_a_single_process_is_not_one_of_several(
    world_size: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.runtime.process_exit import is_one_of_several

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    assert not is_one_of_several()
