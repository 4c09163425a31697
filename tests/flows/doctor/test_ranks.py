"""The job of two ranks, and what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.doctor.ranks import SAID, described, probe_job
from flows.doctor.yard import Yard
from flows.profile import parse_profile


def visited(folder: Path, **tables: Any) -> Yard:
    return Yard(parse_profile({"block": "process", **tables}, "test"), str(folder))


@pytest.mark.parametrize(
    ("pretrain", "nodes", "processes", "gpus"),
    [
        ({}, 1, 1, 0),  # the two ranks are started by the one process
        ({"processes_per_node": 8, "gpus_per_node": 8}, 1, 1, 2),
        ({"nodes": 4, "processes_per_node": 8, "gpus_per_node": 8}, 2, 1, 1),
    ],
)
def test_two_ranks_are_asked_for_whatever_training_wants(
    tmp_path: Path, pretrain: dict[str, int], nodes: int, processes: int, gpus: int
) -> None:
    tables = {"block": "slurm", "slurm": {}, "resources": {"pretrain": pretrain}}
    job = probe_job(visited(tmp_path, **tables))
    assert job.resources.nodes == nodes
    assert job.resources.processes_per_node == processes
    assert job.resources.gpus_per_node == gpus
    assert job.command[1:3] == ("-m", "trainyard.parallel.probe")
    assert str(tmp_path) in job.run_directory


def test_what_ranks_say_is_found_among_other_lines() -> None:
    log = 'NCCL INFO stuff\n[node1] probe: {"ranks": 2}\nprobe: {broken\nbye\n'
    assert SAID.findall(log) == ['{"ranks": 2}']


def test_a_report_in_words() -> None:
    said = {
        "ranks": 2,
        "hosts": ["node1", "node2"],
        "backend": "nccl",
        "nccl": "2.28.9",
        "bytes_per_second": 65.4e9,
        "torch": "2.11.0+cu130",
    }
    words = "2 ranks on node1, node2 over nccl 2.28.9, all-reduce 65.4 GB/s, torch 2.11.0+cu130"
    assert described(said) == words
