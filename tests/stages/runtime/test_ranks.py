"""Several ranks end as one run: all well, or with the status of the first that failed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.backends.outcome import JobEnd, Kind, classify_exit, read_failure
from stages.runtime.failure import RUN_DIR
from tests.memory_group import little_memory
from tests.stages.directly import run_process, torchrun
from tests.stages.pretrain_runs import manifest

TOY = "tests.stages.toy_ranks"


@pytest.mark.slow
def test_three_ranks_write_one_artifact(tmp_path: Path) -> None:
    words = ("--output-dir", str(tmp_path), "--nproc-per-node", "3")
    run_process(TOY, *words)
    assert (tmp_path / "ranks.txt").read_text() == "0 1 2"
    assert manifest(tmp_path).metrics == {"world": 3}
    assert "nothing to do" in run_process(TOY, *words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [("raise", "the network is gone"), ("kill", "rank 1 was killed by SIGKILL")],
)
def test_a_failed_rank_ends_all_ranks(tmp_path: Path, how: str, words: str) -> None:
    began = time.monotonic()
    failing = ("--fail-rank", "1", "--how", how, "--seconds", "30")
    given = ("--output-dir", str(tmp_path), "--nproc-per-node", "3", *failing)
    assert words in run_process(TOY, *given, expect=3)
    assert time.monotonic() - began < 15
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.slow
def test_a_rank_killed_for_its_memory_is_reported_as_out_of_memory(tmp_path: Path) -> None:
    output, run = tmp_path / "output", tmp_path / "run"
    options = ["--nproc-per-node", "2", "--fail-rank", "1", "--how", "memory", "--seconds", "30"]
    with little_memory() as bounded:
        launcher = [*bounded, sys.executable]
        environment = {RUN_DIR: str(run)}
        words = ["--output-dir", str(output), *options]
        run_process(TOY, *words, expect=3, launcher=launcher, **environment)
    outcome = classify_exit("toy", JobEnd(failure=read_failure(str(run)), exit_code=3))
    assert (outcome.kind, outcome.error) == (Kind.OUT_OF_MEMORY, "HostMemoryError"), outcome
    assert outcome.message.startswith("rank 1 was killed by SIGKILL, by the kernel: ")


@pytest.mark.slow
def test_a_signal_reaches_every_rank(tmp_path: Path) -> None:
    arguments = ["--output-dir", str(tmp_path), "--nproc-per-node", "2", "--seconds", "30"]
    with subprocess.Popen(
        [sys.executable, "-m", TOY, *arguments], stderr=subprocess.PIPE
    ) as process:
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
    launcher = torchrun("--standalone", "--nproc-per-node", "2")
    for expected in ("there is no manifest yet", "nothing to do"):
        assert expected in run_process(TOY, "--output-dir", str(tmp_path), launcher=launcher)
    assert (tmp_path / "ranks.txt").read_text() == "0 1"


@pytest.mark.slow
@pytest.mark.distributed
def test_under_torchrun_the_refusal_of_rank_0_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    in_the_way, run = tmp_path / "output", tmp_path / "run"
    in_the_way.write_text("a file")
    launcher, environment = torchrun("--standalone", "--nproc-per-node", "3"), {RUN_DIR: str(run)}
    words = ("--output-dir", str(in_the_way))
    run_process(TOY, *words, expect=1, launcher=launcher, **environment)
    failure = read_failure(str(run))
    assert failure is not None
    assert (failure["class"], failure["exit_status"]) == ("ConfigError", 2)
    assert "this is a file" in failure["message"]
