"""A training whose rank dies, hangs or runs out of memory ends soon with the right outcome."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from flows.backends.outcome import JobEnd, Kind, Outcome, classify_exit, read_failure
from stages.runtime.failure import RUN_DIR
from tests.stages.directly import torchrun
from tests.stages.pretrain_runs import write_documents
from trainyard.artifacts.manifest import read_manifest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SHAPE = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --hidden-dropout 0
    --attention-dropout 0 --micro-batch-size 1 --global-batch-size 4 --eval-iters 0 --lr 1e-2
    --log-interval 1 --tokenizer-type NullTokenizer --vocab-size 31 --split 100,0,0
    --make-vocab-size-divisible-by 8 --nproc-per-node 2
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    numbers = np.random.default_rng(0).integers(0, 31, (40, 100)).tolist()
    return write_documents(tmp_path_factory.mktemp("tokens") / "text", numbers)


@contextmanager
def training(
    tokens: str, save: Path, *options: str, launcher: tuple[str, ...] = (sys.executable,)
) -> Iterator[subprocess.Popen[str]]:
    command = [*launcher, "-m", "stages.pretrain", *SHAPE.split()]
    log = save.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--data-path", tokens, "--save", str(save), *options],
            env={**os.environ, RUN_DIR: str(save.with_suffix(".run"))},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for(save: Path, words: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while words not in (text := save.with_suffix(".log").read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def last_step(save: Path) -> int:
    """The last step on the console."""
    return int(re.findall(r"iteration +(\d+)/", save.with_suffix(".log").read_text())[-1])


def judged(save: Path, code: int) -> Outcome:
    """What a job makes of the run folder; torchrun and srun say 1 whatever happened."""
    failure = read_failure(str(save.with_suffix(".run")))
    assert failure is not None
    return classify_exit("pretrain", JobEnd(failure=failure, exit_code=code, is_of_launcher=True))


def rank_process(parent: int, rank: int) -> int:
    """The process of a rank: children are started in their order."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    found = [int(c) for c in children if f"RANK={rank}\0" in _environment(int(c))]
    assert len(found) == 1, (children, found)
    return found[0]


def _environment(process: int) -> str:
    return "\0" + Path(f"/proc/{process}/environ").read_text() + "\0"


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_killed_rank_ends_all_ranks_within_a_minute(
    tokens: str, tmp_path: Path, axis: str
) -> None:
    save = tmp_path / "run"
    options = (f"--{axis}-model-parallel-size", "2", "--train-iters", "100000")
    with training(tokens, save, *options) as process:
        wait_for(save, "iteration        3/")
        os.kill(rank_process(process.pid, 1), signal.SIGKILL)
        began = time.monotonic()
        assert process.wait(60) == 3
        assert time.monotonic() - began < 60
    outcome = judged(save, 3)
    assert (outcome.kind, outcome.error) == (Kind.INFRASTRUCTURE, "InfrastructureError")
    assert outcome.message.startswith("rank 1 was killed by SIGKILL")
    assert outcome.step is not None
    # The log line and the record of a step are written one after the other.
    assert abs(outcome.step - last_step(save)) <= 1
    text = save.with_suffix(".log").read_text()
    assert "rank 1 was killed by SIGKILL" in text
    assert "Traceback" not in text
    left = subprocess.run(["pgrep", "-f", str(save)], capture_output=True, text=True)
    assert left.stdout == ""


def test_under_torchrun_survivors_report_a_killed_rank(tokens: str, tmp_path: Path) -> None:
    save = tmp_path / "run"
    options = ("--tensor-model-parallel-size", "2", "--train-iters", "100000")
    with training(
        tokens, save, *options, launcher=torchrun("--standalone", "--nproc-per-node=2")
    ) as process:
        wait_for(save, "iteration        3/")
        os.kill(rank_process(process.pid, 1), signal.SIGKILL)
        assert process.wait(60) == 1
    outcome = judged(save, 1)
    assert (outcome.kind, outcome.error) == (Kind.COMMUNICATION, "CommunicationError")
    assert outcome.is_retryable
    assert (outcome.exit_status, "rank 0 of 2 lost its connection" in outcome.message) == (3, True)
    assert outcome.step == last_step(save)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hanging_rank_is_named_with_its_stacks(tokens: str, tmp_path: Path, rank: int) -> None:
    save = tmp_path / "run"
    options = ("--train-iters", "100000", "--hang-timeout-minutes", "0.05")
    with training(tokens, save, *options) as process:
        wait_for(save, "iteration        3/")
        os.kill(rank_process(process.pid, rank), signal.SIGSTOP)
        assert process.wait(60) == 3
    outcome = judged(save, 3)
    assert (outcome.kind, outcome.error) == (Kind.HANG, "HangError")
    assert (outcome.is_retryable, outcome.exit_status) == (True, 3)
    assert outcome.message.startswith("no rank has made progress for")
    assert outcome.step is not None
    # The log line and the record of a step are written one after the other.
    assert abs(outcome.step - last_step(save)) <= 1
    text = save.with_suffix(".log").read_text()
    assert "no rank has made progress" in text
    assert re.search(rf"rank {rank}(, which keeps the messages of ranks,)? does not answer", text)
    assert "training/loop/step.py" in (save / "logs" / f"stacks-rank{1 - rank:04d}.txt").read_text()


def test_ranks_out_of_memory_report_their_memory(tokens: str, tmp_path: Path) -> None:
    save = tmp_path / "run"
    # A process may have 8 GB of addresses; the table of positions alone is of 20 GB.
    bounded = ("bash", "-c", 'ulimit -v 8000000; exec "$@"', "bash", sys.executable)
    options = ("--max-position-embeddings", str(320 * 10**6), "--train-iters", "3")
    with training(tokens, save, *options, launcher=bounded) as process:
        assert process.wait(60) == 3
    outcome = judged(save, 3)
    assert (outcome.kind, outcome.error) == (Kind.OUT_OF_MEMORY, "HostMemoryError")
    assert (outcome.is_retryable, outcome.exit_status) == (True, 3)
    assert re.match(r"rank [01] ran out of memory on the host: .* GB resident", outcome.message)
    assert outcome.step is None  # none was finished


def test_sigusr1_saves_and_the_same_command_resumes(tokens: str, tmp_path: Path) -> None:
    save = tmp_path / "run"
    # Long enough that the signal comes before the end on any machine.
    options = ("--tensor-model-parallel-size", "2", "--train-iters", "200")
    with training(tokens, save, *options) as process:
        wait_for(save, "iteration        3/")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 128 + signal.SIGUSR1
    saved = re.search(r"saved step (\d+) \(asked to stop\)", save.with_suffix(".log").read_text())
    assert saved is not None
    with training(tokens, save, *options) as process:
        assert process.wait(240) == 0
    assert f"resuming from step {saved[1]}" in save.with_suffix(".log").read_text()
    assert read_manifest(str(save / "manifest.json")) is not None
