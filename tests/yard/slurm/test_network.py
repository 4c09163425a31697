"""Ranks on two nodes of Slurm that lose each other are a communication failure and retried."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.backends.outcome import Kind
from tests.yard.faults.faults import Ended, Flow, steps, training, wait_for
from tests.yard.slurm.cluster import profile_on_two_nodes
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(400)]

WAITS_SECONDS = 15
"""So long a rank waits for another one."""


@pytest.fixture
def yard(tmp_path: Path, prefect_api: dict[str, str], cluster: object) -> Yard:
    cache = {"TRAINYARD_CACHE": str(tmp_path / "cache")}
    return Yard(tmp_path, {**prefect_api, **cache, "SLURM_CONF": os.environ["SLURM_CONF"]})


def start(yard: Yard, interface: str, iters: int) -> Flow:
    """Start a training on both nodes, whose ranks talk over a network of theirs."""
    folder = yard.folder
    profile = folder / "site.toml"
    twice = "fruitless_attempts = 2"
    profile.write_text(profile_on_two_nodes(folder, twice, interface=interface))
    document = Path(training(folder, str(folder / "save"), iters))
    wait = f"distributed_timeout_minutes = {WAITS_SECONDS / 60}\n"
    document.write_text(document.read_text() + wait)
    command = ("pretrain", "--config", str(document), "--profile", str(profile))
    return Flow(yard.start("-m", "flows.run_stage", *command), time.monotonic())


def attempts(yard: Yard) -> list[Path]:
    """The run folders, in the order of their submissions."""
    return sorted((yard.folder / "runs").glob("**/pretrain/*"))


def kinds(yard: Yard) -> list[str]:
    return [json.loads((one / "settled.json").read_text())["kind"] for one in attempts(yard)]


def report(folder: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((folder / "failure.json").read_text())
    return document


def test_ranks_that_cannot_connect_are_retried_and_given_up(yard: Yard) -> None:
    """gloo uses an interface that leads to no other machine."""
    ended = start(yard, "lo", 100).ends(300)
    assert ended.status == 3, ended.output
    assert ended.states("pretrain") == ["runs", "failed", "runs", "failed"], ended.output
    assert kinds(yard) == [Kind.COMMUNICATION] * 2, ended.output
    for one in attempts(yard):
        assert report(one)["class"] == "CommunicationError"
        assert re.search(r"rank \d of 2 (did not find|could not join)", str(report(one)["message"]))
    assert "pretrain: NCCL or rendezvous: rank " in ended.output
    assert not steps(yard.folder / "save")


class Cut:
    """The way between the two nodes, both of which still see the controller."""

    def __init__(self) -> None:
        self._ends = self._addresses()

    @staticmethod
    def _addresses() -> list[tuple[str, str]]:
        found = {}
        for line in Path("/etc/hosts").read_text().splitlines():
            if match := re.match(r"(\S+) (node[12]) # yard-slurm", line):
                found[match[2]] = match[1]
        return [("yard-node1", found["node2"]), ("yard-node2", found["node1"])]

    def begin(self) -> None:
        self._route("add")

    def end(self) -> None:
        self._route("del", check=False)

    def _route(self, verb: str, check: bool = True) -> None:
        for node, other in self._ends:
            command = ["ip", "-n", node, "route", verb, "blackhole", other]
            subprocess.run(command, check=check, stderr=subprocess.PIPE)


@pytest.fixture
def cut(yard: Yard) -> Iterator[Cut]:
    """For a test to begin and end."""
    cut = Cut()
    yield cut
    cut.end()


def test_a_network_cut_costs_an_attempt_and_no_saved_step(yard: Yard, cut: Cut) -> None:
    flow = start(yard, "eth0", 400)
    wait_for(lambda: steps(yard.folder / "save"))
    cut.begin()
    (first,) = attempts(yard)
    wait_for((first / "failure.json").exists)
    cut.end()
    ended: Ended = flow.ends(200)
    assert ended.status == 0, ended.output
    assert kinds(yard) == [Kind.COMMUNICATION, Kind.DONE], ended.output
    assert report(first)["class"] == "CommunicationError"
    assert "NCCL or rendezvous" in ended.output
    assert ended.states("pretrain")[-2:] == ["runs", "done"]
    assert "retries in" in ended.output
    log = (attempts(yard)[1] / "log.txt").read_text()
    assert re.search(r"resuming from step \d+0\b", log), log
    assert steps(yard.folder / "save")[-1] == 400
