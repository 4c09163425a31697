"""What pretraining refuses before any work, and the exit status when ranks fail to meet or die."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ports import free_port
from tests.stages.directly import run_process, torchrun
from tests.stages.pretrain_runs import flags, ledger, write_documents
from trainyard.testing.kill import Zygote

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 4,
    "eval_iters": 0,
    "lr": 1e-2,
    "log_interval": 1,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 31,
    "make_vocab_size_divisible_by": 8,
    "split": "100,0,0",
}
WAIT_SECONDS = 120.0
"""For what takes seconds on a machine that is not busy otherwise."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files: `good`, one with less than a sample, and one of a larger vocabulary."""
    folder = tmp_path_factory.mktemp("tokens")
    numbers = np.random.default_rng(0).integers(0, 31, (40, 100)).tolist()
    write_documents(folder / "good", numbers)
    write_documents(folder / "short", [[1, 2, 3, 4, 5]])
    write_documents(folder / "foreign", [*numbers[:7], [*numbers[7][:99], 50256], *numbers[8:]])
    return folder


def words(folder: Path, save: Path, tokens: str = "good", **others: Any) -> list[str]:
    return flags({**OPTIONS, "data_path": folder / tokens, "save": save, **others})


TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}


CP, TWO = {"context_parallel_size": 2}, {"nproc_per_node": 2}
ONE_GROUP = {"num_attention_heads": 4, "num_query_groups": 1, "group_query_attention": True}
LARGE = {"num_layers": 3000, "hidden_size": 2**20, "nproc_per_node": 1}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"nproc_per_node": 3, **TP}, "3 ranks do not fit the layout: .* start 2 or 4 ranks"),
        ({"nproc_per_node": 3}, r"--global-batch-size \(4\) must be divisible .* near it: 3 or 6"),
        (
            {"nproc_per_node": 3, "tensor_model_parallel_size": 3},
            r"--num-attention-heads \(2\) must be divisible by --tensor-model-parallel-size \(3\)",
        ),
        (
            {**TP, **ONE_GROUP, **TWO},
            r"--num-query-groups \(1\) must be divisible by --tensor-model-parallel-size \(2\)",
        ),
        ({**TP, "ffn_hidden_size": 33, **TWO}, r"--ffn-hidden-size \(33\) must be divisible"),
        (
            {**CP, "seq_length": 18, **TWO},
            r"--seq-length \(18\) must be divisible by 2 x --context-parallel-size \(4\)",
        ),
        (
            {**TP, "sequence_parallel": True, "seq_length": 17, **TWO},
            r"--seq-length \(17\) must be divisible by --tensor-model-parallel-size",
        ),
        (
            {**CP, "window_size": "8,0", **TWO},
            "p2p, the default, .* --window-size .* works with --cp-comm-type allgather or a2a",
        ),
        ({**PP, "num_layers": 3, **TWO}, "--num-layers"),
        ({"tokens": "short"}, "5 tokens in 1 documents, less than one sample of --seq-length 16"),
        (
            LARGE,
            r"the model has 4\.0e\+16 parameters, the limit is 1e\+15; reduce one of: "
            ".*--hidden-size 10485",
        ),
        (
            {"hidden_size": 2**20},
            r"weights and gradients of 26,\d{3},\d{3},\d{3},\d{3} parameters .* take .* GiB, and ",
        ),
        (
            {"tokens": "foreign"},
            "foreign: token 50256 in document 7 at place 99 is outside the vocabulary of 31 ",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_before_any_work(
    zygote: Zygote, folder: Path, tmp_path: Path, others: dict[str, Any], message: str
) -> None:
    save = tmp_path / "run"
    found, _, log = zygote.run("stages.pretrain", words(folder, save, **others))
    assert found == (1 if others.get("tokens") == "foreign" else 2), log
    assert re.search(message, log), log
    assert "Traceback" not in log
    assert not list(save.glob("iter_*"))
    assert not (save / "manifest.json").exists()
    if "nproc_per_node" in others:  # before inputs are looked at and ranks are started
        assert "running because" not in log
        assert not save.exists()


# --- ranks that a launcher started --------------------------------------------------------------


@contextmanager
def started(
    command: Sequence[str], log: Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def a_rank(rank: int, world_size: int, port: int) -> dict[str, str]:
    ranks = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    return {**{name: str(value) for name, value in ranks.items()}, "MASTER_ADDR": "127.0.0.1"}


def run_rank(
    folder: Path, tmp_path: Path, environment: dict[str, str], expect: int, **others: Any
) -> str:
    given = words(folder, tmp_path / "run", **others)
    return run_process("stages.pretrain", *given, expect=expect, **environment)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"nproc_per_node": 3, **TP}, "3 ranks do not fit the layout: "),
        ({"nproc_per_node": 3}, "--global-batch-size (4) must be divisible"),
    ],
)
def test_a_dry_run_refuses_a_layout_with_the_message_of_the_run(
    zygote: Zygote, folder: Path, tmp_path: Path, others: dict[str, Any], message: str
) -> None:
    line = words(folder, tmp_path / "run", **others)
    ends = [zygote.run("stages.pretrain", [*line, *more]) for more in ([], ["--dry-run"])]
    assert [status for status, _, _ in ends] == [2, 2]
    (of_run,), (of_dry_run,) = (
        {text[text.index(message) :] for text in log.splitlines() if message in text}
        for _, _, log in ends
    )
    assert of_run == of_dry_run


def test_dry_run_does_not_assume_one_rank(zygote: Zygote, folder: Path, tmp_path: Path) -> None:
    line = words(folder, tmp_path / "run", **TP)
    status, _, log = zygote.run("stages.pretrain", [*line, "--dry-run"])
    assert status == 0, log
    status, _, log = zygote.run("stages.pretrain", line)
    assert (status, "1 rank does not fit the layout" in log) == (2, True)


def test_degrees_are_compared_with_the_ranks_of_a_launcher(folder: Path, tmp_path: Path) -> None:
    log = run_rank(folder, tmp_path, a_rank(1, 3, free_port()), expect=2, **TP)
    assert "3 ranks do not fit the layout" in log


@pytest.mark.distributed
def test_a_port_in_use_is_named_in_the_error(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        log = run_rank(folder, tmp_path, a_rank(0, 2, port), expect=3)
    assert f"MASTER_PORT {port} is in use on this machine" in log
    assert "Traceback" not in log


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("rank", "message"),
    [(0, "not all of 2 ranks came to 127.0.0.1"), (1, "rank 1 of 2 did not find the others")],
)
def test_missing_ranks_end_the_run(folder: Path, tmp_path: Path, rank: int, message: str) -> None:
    environment = a_rank(rank, 2, free_port())
    log = run_rank(folder, tmp_path, environment, expect=3, distributed_timeout_minutes=0.03)
    assert message in log
    assert "--distributed-timeout-minutes" in log
    assert "Traceback" not in log


# --- ranks that die -----------------------------------------------------------------------------


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while text not in (found := log.read_text()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def process_of_rank(rank: int, save: Path) -> int:
    """By what it was started with."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment and str(save).encode() in arguments:
            return int(entry.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.distributed
@pytest.mark.parametrize("degrees", [{}, TP, PP], ids=["dp2", "tp2", "pp2"])
def test_killed_rank_is_named_first(folder: Path, tmp_path: Path, degrees: dict[str, int]) -> None:
    save, log, reports = tmp_path / "run", tmp_path / "log", tmp_path / "reports"
    others = {"train_iters": 100000, "nproc_per_node": 2, **degrees}
    command = [sys.executable, "-m", "stages.pretrain", *words(folder, save, **others)]
    with started(command, log, TRAINYARD_RUN_DIR=str(reports)) as process:
        wait_for(log, "iteration        3/")
        os.kill(process_of_rank(1, save), signal.SIGKILL)
        began = time.monotonic()
        assert process.wait(WAIT_SECONDS) == 3
    assert time.monotonic() - began < 60
    errors = [line for line in log.read_text().splitlines() if " error " in line]
    assert "rank 1 was killed by SIGKILL" in errors[0], errors
    failure = json.loads((reports / "failure.json").read_text())
    assert failure["message"].startswith("rank 1 was killed by SIGKILL")
    assert failure["exit_status"] == 3
    assert not (save / "manifest.json").exists()


@pytest.mark.distributed
def test_under_torchrun_the_other_ranks_end_too(folder: Path, tmp_path: Path) -> None:
    save, log = tmp_path / "run", tmp_path / "log"
    arguments = words(folder, save, train_iters=100000, **TP)
    launcher = torchrun("--standalone", "--nproc-per-node", "2")
    command = [*launcher, "-m", "stages.pretrain", *arguments]
    with started(command, log) as process:
        wait_for(log, "iteration        3/")
        os.kill(process_of_rank(1, save), signal.SIGKILL)
        began = time.monotonic()
        assert process.wait(WAIT_SECONDS) != 0
    assert time.monotonic() - began < 60
    assert "Signal 9 (SIGKILL) received by PID" in log.read_text()


# --- two hosts ----------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("degrees", [{}, TP], ids=["dp2", "tp2"])
def test_two_hosts_train_as_one(folder: Path, tmp_path: Path, degrees: dict[str, int]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_process("stages.pretrain", *words(folder, one, nproc_per_node=2, **degrees))
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    host = torchrun("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "run7", *where)
    command = [*host, "-m", "stages.pretrain", *words(folder, two, **degrees)]
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    with started(command, logs[0]) as a, started(command, logs[1]) as b:
        for process, log in ((a, logs[0]), (b, logs[1])):
            assert process.wait(120) == 0, log.read_text()
    assert ledger(two) == ledger(one)
    assert len(ledger(two)) == 4
