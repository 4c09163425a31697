"""The Slurm block and the shares of an array, which Slurm lists and forgets one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.backends.outcome import Kind
from flows.backends.slurm import job as slurm
from flows.backends.slurm.client import CommandResult
from flows.backends.spec import Shares
from tests.flows.backends.slurm.fake_slurm import (
    UNKNOWN,
    FakeSlurm,
    block,
    follow,
    state,
    write_exit,
)


def share(index: int, name: str, **fields: str) -> CommandResult:
    return state(name, ArrayJobId="17", ArrayTaskId=str(index), **fields)


def listed(*shares: CommandResult) -> CommandResult:
    return CommandResult(0, "\n".join(share.out for share in shares), "")


@dataclass
class Accounted(FakeSlurm):
    """A cluster with accounting."""

    sacct: str = ""

    def __call__(self, command: Sequence[str]) -> CommandResult:
        answer = super().__call__(command)
        return CommandResult(0, self.sacct, "") if command[0] == "sacct" else answer


TWO, THREE = Shares(count=2), Shares(count=3)


def test_shares_not_listed_yet_are_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "FORGOTTEN_SECONDS", 60)
    first = share(0, "COMPLETED")
    played = FakeSlurm([first, first, listed(first, share(1, "COMPLETED"))])
    assert follow(block(tmp_path, played, shares=TWO)).kind is Kind.DONE
    assert played.asked.count("scontrol") == 3


@pytest.mark.parametrize("end", ["TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"])
def test_seen_end_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(slurm, "FORGOTTEN_SECONDS", 60)
    write_exit(tmp_path / "share-1", 0)
    played = FakeSlurm([listed(share(0, end), share(1, "RUNNING")), share(1, "COMPLETED")])
    outcome = follow(block(tmp_path, played, shares=TWO))
    assert (outcome.is_retryable, outcome.failed_shares) == (True, (0,))
    assert played.asked.count("scontrol") == 2, "the end is seen at once"


def test_a_share_that_is_requeued_has_not_ended_yet(tmp_path: Path) -> None:
    lost = listed(share(0, "NODE_FAIL"), share(1, "COMPLETED"))
    again = listed(share(0, "PENDING", Restarts="1"), share(1, "COMPLETED"))
    running = listed(share(0, "RUNNING"), share(1, "RUNNING"))
    part_lost = listed(share(0, "NODE_FAIL"), share(1, "RUNNING"))
    played = FakeSlurm([running, part_lost, again, share(0, "COMPLETED", Restarts="1")])
    assert follow(block(tmp_path / "again", played, shares=TWO)).kind is Kind.DONE
    assert follow(block(tmp_path / "lost", FakeSlurm([lost]), shares=TWO)).kind is Kind.NODE_FAILURE


def test_accounting_has_the_ends_of_forgotten_shares(tmp_path: Path) -> None:
    rows = "17_0|TIMEOUT|0:15|node1|merge-k-1\n17_1|RUNNING|0:0|node1|merge-k-1\n"
    played = Accounted([share(2, "RUNNING"), share(2, "COMPLETED")], sacct=rows)
    write_exit(tmp_path / "share-0", 143)
    write_exit(tmp_path / "share-1", 3)
    outcome = follow(block(tmp_path, played, shares=THREE))
    assert (outcome.kind, outcome.failed_shares) == (Kind.TIME_LIMIT, (0, 1))
    assert played.asked.count("scontrol") == 2


def test_exit_files_replace_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "FORGOTTEN_SECONDS", 60)
    write_exit(tmp_path / "share-0", 3)
    write_exit(tmp_path / "share-1", 0)
    played = FakeSlurm([share(2, "RUNNING"), share(2, "COMPLETED")])
    outcome = follow(block(tmp_path, played, shares=THREE))
    assert (outcome.kind, outcome.failed_shares) == (Kind.INFRASTRUCTURE, (0,))
    assert played.asked.count("scontrol") == 2


@pytest.mark.parametrize("rest", ["...", "1...%4"])
def test_shares_that_wait_in_a_list_that_is_cut_are_waited_for(tmp_path: Path, rest: str) -> None:
    waiting = state("PENDING", ArrayJobId="17", ArrayTaskId=f"0,{rest}")
    ended = listed(*(share(index, "COMPLETED") for index in range(3)))
    for index in range(3):  # of a run before, that was requeued
        write_exit(tmp_path / f"share-{index}", 3)
    played = FakeSlurm([waiting, waiting, ended])
    assert follow(block(tmp_path, played, shares=THREE)).kind is Kind.DONE
    assert played.asked.count("scontrol") == 3


def test_accounting_reports_a_share_without_a_log(tmp_path: Path) -> None:
    rows = "17_0|FAILED|0:53|n7|merge-k-1\n17_1|COMPLETED|0:0|n7|merge-k-1\n"
    outcome = follow(block(tmp_path, Accounted([UNKNOWN], sacct=rows), shares=TWO))
    assert (outcome.kind, outcome.failed_shares) == (Kind.NODE_FAILURE, (0,))
