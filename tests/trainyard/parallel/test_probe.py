"""Two ranks that meet and add up, or say why they cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainyard.machine import Machine, inspect_machine
from trainyard.parallel.probe import MARK

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def probe(*arguments: str, **environment: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status, and what the ranks said."""
    done = subprocess.run(
        [sys.executable, "-m", "trainyard.parallel.probe", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return done.returncode, [json.loads(line.removeprefix(MARK)) for line in lines]


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_started_here_add_up(count: int) -> None:
    status, (said,) = probe("--ranks", str(count))
    assert status == 0
    assert (said["ranks"], len(said["hosts"])) == (count, 1)
    assert said["bytes_per_second"] > 1e6
    assert Machine.from_document(said["machine"]).host == inspect_machine().host


def test_a_rank_whose_others_do_not_come_says_so_in_time() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713"}
    status, (said,) = probe("--seconds", "2", **alone)
    assert status == 3
    assert "ranks" in said["error"]


def test_a_rank_without_an_address_is_refused() -> None:
    status, (said,) = probe("--seconds", "2", RANK="0", WORLD_SIZE="2")
    assert status == 2
    assert "MASTER_ADDR and MASTER_PORT not set" in said["error"]
