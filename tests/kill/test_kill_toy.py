"""The harness itself, on the toy stage: finished units are kept, torn ones are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainyard.testing.kill import (
    KILLED,
    Zygote,
    check_kill_anywhere,
    kill_a_run,
    spread,
)


def test_points_are_spread_from_the_first_to_the_last_operation() -> None:
    assert spread(3, 20) == [1, 2, 3]
    assert spread(101, 5) == [1, 26, 51, 76, 101]


class Runs:
    """In the place of processes: each makes so many operations."""

    def __init__(self, operations: list[int], dies: bool = True) -> None:
        self.operations, self.dies = operations, dies

    def run(self, module: str, arguments: list[str], kill_at: int = 0) -> tuple[int, int, str]:
        made = self.operations.pop(0) if len(self.operations) > 1 else self.operations[0]
        killed = self.dies and 0 < kill_at <= made
        return (KILLED, kill_at, "") if killed else (0, made, "")


def kill(runs: Runs, number: int) -> tuple[int, str]:
    return kill_a_run(runs, "stage", lambda name: [name], number)  # type: ignore[arg-type]


def test_a_run_that_ends_before_the_point_is_killed_sooner() -> None:
    assert kill(Runs([100]), 100) == (100, "kill-100")
    assert kill(Runs([98, 100]), 100) == (88, "kill-100-1")


def test_runs_that_cannot_be_killed_fail_the_check() -> None:
    with pytest.raises(AssertionError, match="operation 100 did not kill the run"):
        kill(Runs([100], dies=False), 100)
    with pytest.raises(AssertionError, match="operation 5 did not kill"):
        kill(Runs([0]), 5)  # nothing is counted
    with pytest.raises(AssertionError, match="3 runs ended before"):
        kill(Runs([98, 80, 60, 40]), 100)


@pytest.mark.kill
def test_the_toy_stage_survives_a_kill_anywhere(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\ntwo\nthree\n")
    os.utime(tmp_path / "in.txt", (1e9, 1e9))  # settled: its digest is remembered

    source = ["--input", str(tmp_path / "in.txt")]
    with Zygote("tests.stages.toy") as zygote:
        kills = check_kill_anywhere(
            zygote,
            "tests.stages.toy",
            lambda name: [*source, "--output-dir", str(tmp_path / name)],
            lambda name: str(tmp_path / name / "manifest.json"),
            20,
        )
        assert kills == 20
    leftovers = [path.name for path in tmp_path.rglob("*") if path.name.startswith(".")]
    assert leftovers == []
