"""Several ranks end as one run: all well, or with the status of the first that failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.backends.outcome import JobEnd, Kind, classify_exit, read_failure
from stages.runtime.failure import RUN_DIR
from tests.memory_group import little_memory
from trainyard.artifacts.manifest import read_manifest

COMMAND = [sys.executable, "-m", "tests.stages.toy_ranks"]


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_three_ranks_write_one_artifact(tmp_path: Path) -> None:
    done = launch("--output-dir", str(tmp_path), "--nproc-per-node", "3")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ranks.txt").read_text() == "0 1 2"
    found = read_manifest(str(tmp_path / "manifest.json"))
    assert found is not None
    assert found[0].metrics == {"world": 3}
    assert "nothing to do" in launch("--output-dir", str(tmp_path), "--nproc-per-node", "3").stderr


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status", "words"), [
    ("raise", 3, "the network is gone"),
    ("kill", 3, "rank 1 was killed by SIGKILL"),
])  # fmt: skip
def test_the_failure_of_one_rank_ends_all(
    tmp_path: Path, how: str, status: int, words: str
) -> None:
    began = time.monotonic()
    done = launch(
        *("--output-dir", str(tmp_path), "--nproc-per-node", "3"),
        *("--fail-rank", "1", "--how", how, "--seconds", "30"),
    )
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert time.monotonic() - began < 15
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.slow
def test_a_rank_that_the_kernel_ended_for_its_memory_is_told_as_that(tmp_path: Path) -> None:
    output, run = tmp_path / "output", tmp_path / "run"
    options = ["--nproc-per-node", "2", "--fail-rank", "1", "--how", "memory", "--seconds", "30"]
    with little_memory() as bounded:
        done = subprocess.run(
            [*bounded, *COMMAND, "--output-dir", str(output), *options],
            env={**os.environ, RUN_DIR: str(run)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 3, done.stderr
    outcome = classify_exit("toy", JobEnd(failure=read_failure(str(run)), exit_code=3))
    assert (outcome.kind, outcome.error) == (Kind.OUT_OF_MEMORY, "HostMemoryError"), outcome
    assert outcome.message.startswith("rank 1 was killed by SIGKILL, by the kernel: ")


@pytest.mark.slow
def test_a_signal_reaches_every_rank(tmp_path: Path) -> None:
    arguments = ["--output-dir", str(tmp_path), "--nproc-per-node", "2", "--seconds", "30"]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 20
        while len(list(tmp_path.rglob("?.txt"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    ranks = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert ranks.stdout == ""


@pytest.mark.slow
@pytest.mark.distributed
def test_under_torchrun_rank_0_decides_for_all(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["--nproc-per-node", "2", "-m", "tests.stages.toy_ranks"]
    command = [*torchrun, *program, "--output-dir", str(tmp_path)]
    for expected in ("there is no manifest yet", "nothing to do"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert expected in done.stderr
    assert (tmp_path / "ranks.txt").read_text() == "0 1"


@pytest.mark.slow
@pytest.mark.distributed
def test_under_torchrun_the_refusal_of_rank_0_is_what_is_told(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    in_the_way, run = tmp_path / "output", tmp_path / "run"
    in_the_way.write_text("a file")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["--nproc-per-node", "3", "-m", "tests.stages.toy_ranks"]
    done = subprocess.run(
        [*torchrun, *program, "--output-dir", str(in_the_way)],
        env={**os.environ, RUN_DIR: str(run)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    failure = read_failure(str(run))
    assert failure is not None
    assert (failure["class"], failure["exit_status"]) == ("ConfigError", 2)
    assert "this is a file" in failure["message"]
