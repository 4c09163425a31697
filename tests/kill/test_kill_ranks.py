"""A rank is killed during a save: the others end, and a rerun gives the bits of a whole run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.stages.directly import run_process
from tests.stages.pretrain_runs import arguments, manifest
from tests.stages.test_pretrain_failures import rank_process
from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import certificate

pytestmark = [pytest.mark.kill, pytest.mark.distributed, pytest.mark.timeout(300)]

# An embedding of some size, so that a save takes long enough to be met.
RUN: dict[str, Any] = {
    **{"nproc_per_node": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
    **{"vocab_size": 20001, "hidden_size": 64, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    **{"train_iters": 10, "save_interval": 2, "save_retain_interval": 4, "eval_interval": 5},
}
"""Steps 4, 8 and 10 stay; 2 and 6 serve to go on from."""

WAYS = {"in the background": ["--async-save"], "waited for": []}

SETTLED_SECONDS = 0.3
"""After which a save that a stopped rank takes part in is surely not published any more."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("tokens") / "t", [60] * 60)


@pytest.fixture(scope="module")
def whole(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs; its saves are waited for."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_process(*command(tokens, folder))
    return folder


def command(tokens: str, save: Path, *options: str) -> list[str]:
    return ["stages.pretrain", *arguments(tokens, save, **RUN), *options]


@pytest.mark.parametrize(
    ("way", "rank"),
    [
        ("in the background", 1),
        ("waited for", 0),
        pytest.param("in the background", 0, marks=pytest.mark.full),
        pytest.param("waited for", 1, marks=pytest.mark.full),
    ],
)
def test_a_run_survives_the_kill_of_one_rank_in_a_save(
    way: str, rank: int, tokens: str, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = command(tokens, run, *WAYS[way])
    with subprocess.Popen(
        [sys.executable, "-m", *words], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            cut = kill_in_a_save(process, rank, run)
            _, text = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 3, text
    assert f"rank {rank} was killed by SIGKILL" in text
    published = sorted(int(path.parent.name[5:]) for path in run.glob("iter_*/manifest.json"))
    assert published, "nothing to go on from"
    assert cut not in published
    assert cut > published[-1]
    assert f"resuming from step {published[-1]}" in run_process(*words)
    assert (run / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    assert manifest(run).output_digest == manifest(whole).output_digest
    assert certificate(run).is_complete
    assert [path for path in run.rglob(".*") if path.is_file()] == []


def kill_in_a_save(process: subprocess.Popen[str], rank: int, run: Path) -> int:
    """Kill a rank while files of a step are there and its manifest is not; which step that was.

    The rank is stopped first: once it is, and the step is still not published, it never will be. A
    save that was done before is passed over, and the next one waited for."""
    for step in range(4, RUN["train_iters"], 2):
        folder = run / f"iter_{step:07d}"
        wait_for_a_file(folder, process)
        victim = rank_process(process.pid, rank)
        os.kill(victim, signal.SIGSTOP)
        time.sleep(SETTLED_SECONDS)
        if not (folder / "manifest.json").exists():
            os.kill(victim, signal.SIGKILL)
            return step
        os.kill(victim, signal.SIGCONT)
    raise AssertionError("every save was over before its rank was stopped")


def wait_for_a_file(folder: Path, process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not (folder.is_dir() and any(folder.iterdir())):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{folder} does not appear"
        time.sleep(0.0005)
