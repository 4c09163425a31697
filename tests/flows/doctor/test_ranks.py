"""The job of two ranks, and what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.backends.spec import Resources
from flows.doctor.context import YardContext
from flows.doctor.ranks import described, probe_job, report_in, without_gpus
from flows.yard.read_profile import parse_profile
from trainyard.machine import inspect_machine


def visited(folder: Path, **tables: Any) -> YardContext:
    return YardContext(parse_profile({"block": "process", **tables}, "test"), str(folder))


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


SAID_OF_NCCL = {
    "ranks": 2,
    "hosts": ["node1", "node2"],
    "backend": "nccl",
    "nccl": "2.28.9",
    "bytes_per_second": 65.4e9,
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "devices": 1,
}
OVER_GLOO = {**SAID_OF_NCCL, "backend": "gloo", "nccl": ""}
OF_CPUS = {**OVER_GLOO, "torch": "2.11.0+cpu", "cuda": "", "devices": 0}


MACHINE = inspect_machine().to_document()
WHOLE = "probe: " + json.dumps({**OF_CPUS, "machine": MACHINE})
ILL = 'probe: {"error": "node2 is out of reach"}'

BROKEN = {
    "cut short": WHOLE[:-20],
    "two in one line": WHOLE[:50] + WHOLE,
    "text in the middle": WHOLE.replace("hosts", "hoNCCL INFO: b\x1b[2Jsts\\"),
    "parts are missing": 'probe: {"ranks": 2}',
    "half an error": 'probe: {"error": 1, "machine"',
    "deep": 'probe: {"a":' + "[" * 20_000 + "}",
}


def test_the_report_of_ranks_is_found_among_other_lines() -> None:
    log = f"NCCL INFO stuff\n[node1] {WHOLE}\nprobe: {{broken\nbye\n"
    assert report_in(log) == json.loads(WHOLE.removeprefix("probe: "))
    assert report_in(f"{log}{ILL}\n") == {"error": "node2 is out of reach"}
    assert report_in("NCCL INFO stuff\n") is None


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_broken_report_of_a_rank_is_a_line_of_words(line: str) -> None:
    (error,) = (report_in(f"bye\n{line}\n") or {}).values()
    assert error.startswith("the report of a rank is cut short or mixed with others: ")
    assert "\n" not in error


def test_a_report_is_described_in_one_line() -> None:
    words = "2 ranks on node1, node2 over nccl 2.28.9, all-reduce 65.4 GB/s, torch 2.11.0+cu130"
    assert described(SAID_OF_NCCL) == words


@pytest.mark.parametrize(
    ("report", "nodes", "gpus", "lacking"),
    [
        (SAID_OF_NCCL, 2, 1, ""),
        (OF_CPUS, 2, 0, ""),
        (OF_CPUS, 2, 1, r"they have 1 GPUs a node, and torch (without CUDA) sees 0"),
        (
            {**OVER_GLOO, "devices": 0},
            2,
            1,
            r"have 1 GPUs a node, and torch (CUDA 13.0) sees 0",
        ),
        (OVER_GLOO, 2, 1, "over gloo, all-reduce 65.4 GB/s, torch 2.11.0+cu130; between GPUs it"),
        (OVER_GLOO, 1, 1, ""),  # two ranks on the one GPU that training has: NCCL takes no such
        ({**OVER_GLOO, "devices": 2}, 1, 2, "must be nccl"),
    ],
)
def test_idle_gpus_are_reported(
    report: dict[str, Any], nodes: int, gpus: int, lacking: str
) -> None:
    found = without_gpus(report, Resources(nodes=nodes, gpus_per_node=gpus))
    assert lacking in found
    assert bool(found) == bool(lacking)
