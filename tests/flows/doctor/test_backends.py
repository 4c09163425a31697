"""What doctor says of the partitions that stages of a yard go to."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from flows.doctor.backends import jobs
from flows.doctor.check import CheckResult, State
from flows.doctor.context import YardContext
from flows.yard.read_profile import parse_profile

NODES = {"cpu": "cpu*|idle|2|(null)", "h100": "h100|idle|4|gpu:8", "old": "old|down|1|(null)"}


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site with these partitions, as its programs tell of it."""
    cases = "".join(f"*--partition={name}) echo '{line}' ;;\n" for name, line in NODES.items())
    everything = "\n".join(NODES.values())
    programs = {
        "scontrol": """case "$*" in
*config*) printf 'KillOnBadExit           = 0\\nKillWait                = 30 sec\\n' ;;
*) echo 'Slurmctld(primary) at head is UP' ;;
esac""",
        "sinfo": f'case "$*" in\n{cases}*--partition=*) exit 1 ;;\n*) echo "{everything}" ;;\nesac',
    }
    for name, text in programs.items():
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def asked(text: str) -> CheckResult:
    profile = parse_profile(tomllib.loads(f'block = "slurm"\n{text}'), "site")
    return jobs(YardContext(profile, "/yard"))


def test_every_partition_is_looked_at() -> None:
    answer = asked('[slurm]\npartition = "cpu"\n[slurm.pretrain]\npartition = "h100"\n')
    assert answer.state is State.OK
    assert "2 of 2 nodes of cpu run jobs; 4 of 4 nodes of h100 run jobs" in answer.message


def test_variables_for_other_clusters_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "there")
    answer = asked("")
    assert answer.state is State.FAIL
    assert "SLURM_CLUSTERS (there)" in answer.message


def test_a_missing_partition_of_a_stage_is_named() -> None:
    answer = asked('[slurm]\npartition = "cpu"\n[slurm.pretrain]\npartition = "h200"\n')
    assert (answer.state, answer.message) == (State.FAIL, "no partition h200")


def test_gpus_are_looked_for_where_the_stage_goes_that_asks_for_them() -> None:
    wants = "[resources.pretrain]\ngpus_per_node = 8\n"
    answer = asked(f'{wants}[slurm]\npartition = "cpu"\n[slurm.pretrain]\npartition = "h100"\n')
    assert answer.state is State.OK
    answer = asked(f'{wants}[slurm]\npartition = "h100"\n[slurm.pretrain]\npartition = "cpu"\n')
    assert answer.state is State.FAIL
    assert answer.todo == "choose another partition for pretrain, or lower gpus_per_node"


def test_a_partition_without_a_running_node_fails_the_check() -> None:
    answer = asked('[slurm.merge]\npartition = "old"\n')
    assert (answer.state, answer.message) == (State.FAIL, "0 of 1 nodes of old run jobs")


@pytest.mark.parametrize(
    ("watch", "state"),
    [
        ("[watch]\ngrace_seconds = 29", State.OK),
        ("[watch.pretrain]\ngrace_seconds = 31", State.WARN),
    ],
)
def test_the_time_that_scancel_leaves_to_save_is_reported(watch: str, state: State) -> None:
    answer = asked(f'[slurm]\npartition = "cpu"\n{watch}\n')
    assert answer.state is state
    assert "KillWait 30 s" in answer.message
    assert ("not by scancel" in answer.todo) is (state is State.WARN)
