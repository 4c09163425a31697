"""Doctor's checks of a machine, on machines with each fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.doctor import machine
from flows.doctor.check import State
from flows.doctor.context import YardContext
from flows.yard.read_profile import parse_profile
from trainyard.machine import Gpu, Machine, inspect_machine

GIB = 2**30

SOUND = Machine(
    host="node1",
    python="3.11.7",
    shared_memory_bytes=16 * GIB,
    open_files=65536,
    open_files_hard=65536,
    locked_memory_bytes=-1,
    locale="C.UTF-8",
    encodings=("utf-8", "UTF-8", "utf-8"),
    gpus=(Gpu("NVIDIA H200", "580.159", 140 * GIB),) * 8,
    gpu_fault="",
)


def yard(found: Machine | None, folder: Path, **tables: Any) -> YardContext:
    document = {"block": "process", **tables}
    visited = YardContext(parse_profile(document, "test"), str(folder))
    visited.there = found
    return visited


def test_a_sound_machine_passes(tmp_path: Path) -> None:
    visited = yard(SOUND, tmp_path, resources={"gpus_per_node": 8})
    for look in (machine.shared_memory, machine.limits, machine.text, machine.gpus):
        assert look(visited).state is State.OK, look(visited)


@pytest.mark.parametrize(
    ("change", "look", "state"),
    [
        ({"shared_memory_bytes": 64 * 2**20}, machine.shared_memory, State.FAIL),
        ({"shared_memory_bytes": 512 * 2**20}, machine.shared_memory, State.WARN),
        ({"shared_memory_bytes": None}, machine.shared_memory, State.WARN),
        ({"open_files": 256}, machine.limits, State.FAIL),
        ({"open_files": 1024}, machine.limits, State.WARN),
        ({"open_files": -1}, machine.limits, State.OK),
        ({"encodings": ("ascii", "UTF-8", "utf-8")}, machine.text, State.FAIL),
        ({"encodings": ("utf-8", "ANSI_X3.4-1968", "utf-8")}, machine.text, State.FAIL),
        ({"locale": "C"}, machine.text, State.WARN),
        ({"locale": ""}, machine.text, State.WARN),
        ({"gpus": (), "gpu_fault": "no driver"}, machine.gpus, State.FAIL),
        ({"gpus": SOUND.gpus[:7]}, machine.gpus, State.FAIL),
        ({"gpus": (*SOUND.gpus, Gpu("NVIDIA H100", "580", GIB))}, machine.gpus, State.WARN),
    ],
)
def test_machine_faults(tmp_path: Path, change: dict[str, Any], look: Any, state: State) -> None:
    visited = yard(replace(SOUND, **change), tmp_path, resources={"gpus_per_node": 8})
    answer = look(visited)
    assert answer.state is state, answer
    assert bool(answer.todo) == (state is not State.OK)


def test_infiniband_wants_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = yard(replace(SOUND, locked_memory_bytes=8 * 2**20), tmp_path)
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path / "none")
    assert machine.limits(little).state is State.OK
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path / "infiniband")
    assert machine.limits(little).state is State.FAIL
    assert "LimitMEMLOCK" in machine.limits(little).todo
    assert machine.limits(yard(SOUND, tmp_path)).state is State.OK


def test_a_report_names_a_machine_that_is_not_the_stages(tmp_path: Path) -> None:
    tables = {"block": "slurm", "slurm": {}, "resources": {"gpus_per_node": 8}}
    elsewhere = yard(None, tmp_path, **tables)
    assert "not the stages'" in machine.limits(elsewhere).message
    assert machine.gpus(elsewhere).state is State.SKIPPED
    elsewhere.there = SOUND
    assert "on node1" in machine.limits(elsewhere).message
    assert machine.gpus(elsewhere).state is State.OK


@pytest.mark.parametrize("block", ["container", "kubernetes"])
def test_memory_of_containers(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor may be in a container itself, with 64 MiB of the one and little of the other."""
    visited = yard(None, tmp_path / "made", block=block, image="yard/cpu:1")
    visited.here = replace(SOUND, shared_memory_bytes=64 * 2**20)
    found = machine.shared_memory(visited)
    assert (found.state, found.message[:3]) == (
        State.SKIPPED,
        "16g" if block == "container" else "16G",
    )
    assert ("--submit" in found.message) == ("--submit" in machine.gpus(visited).message)
    assert ("--submit" in found.message) == (block == "kubernetes")
    visited.there = visited.here
    found = machine.shared_memory(visited)
    assert (found.state, f"[{block}]" in found.todo) == (State.FAIL, True)

    monkeypatch.setattr(machine, "_by_file_system", set)  # of names
    monkeypatch.setattr(machine, "DOCKER", tmp_path / "none")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert machine.folders(visited) == {"yard", "runs", "scratch", "cache"}
    monkeypatch.setattr(machine, "DOCKER", tmp_path)
    assert machine.folders(visited) == {"yard", "runs"}


def test_each_file_system_is_looked_at_once_and_left_as_it_was(tmp_path: Path) -> None:
    found = machine.folders(yard(None, tmp_path / "not" / "yet"))
    assert len({folder.stat().st_dev for _, folder in found}) == len(found)
    free, inodes, fault = machine.room(tmp_path)
    assert (free > 0, inodes > 0, fault) == (True, True, "")
    assert list(tmp_path.iterdir()) == []


def test_this_machine_survives_a_document() -> None:
    here = inspect_machine()
    assert Machine.from_document(here.to_document()) == here
    assert here.encodings[0] == "utf-8"
    assert here.open_files != 0


def test_a_driver_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.159.04, 143771'\n")
    program.chmod(0o755)
    (gpu,) = inspect_machine().gpus
    assert (gpu.name, gpu.driver, gpu.memory_bytes) == ("NVIDIA H200", "580.159.04", 143771 << 20)
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML' >&2; exit 9\n")
    found = inspect_machine()
    assert (found.gpus, found.gpu_fault) == ((), "nvidia-smi: Failed to initialize NVML")
