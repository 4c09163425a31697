"""What the end of a container means, where no engine of the tests brings it about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.backends.container.client import ContainerState
from flows.backends.container.job import classify_container
from flows.backends.outcome import Kind, Outcome
from flows.backends.spec import LaunchSpec, Resources


def judge(
    folder: Path,
    code: int | None,
    oom: bool = False,
    by_us: Kind | None = None,
    ranks: int = 1,
) -> Outcome:
    spec = LaunchSpec(
        name="pretrain",
        command=("python",),
        run_directory=str(folder),
        resources=Resources(processes_per_node=ranks),
    )
    if code is None:
        return classify_container(spec, "yard-1", None, by_us)
    state = ContainerState("id", "key", "exited", code, oom, "", 0.0, 1.0)
    return classify_container(spec, "yard-1", state, by_us)


def write(folder: Path, name: str, **document: object) -> None:
    (folder / name).write_text(json.dumps(document))


def test_a_machine_that_was_restarted_is_a_node_failure(tmp_path: Path) -> None:
    outcome = judge(tmp_path, 255)
    assert outcome.kind is Kind.NODE_FAILURE
    assert "restarted" in outcome.message


def test_what_the_stage_reports_goes_before_the_engine(tmp_path: Path) -> None:
    write(tmp_path, "failure.json", **{"class": "ConfigError", "exit_status": 2, "message": "m"})
    assert judge(tmp_path, 137, oom=True).kind is Kind.CONFIG


def test_a_child_that_was_killed_for_its_memory_is_why_its_parent_failed(tmp_path: Path) -> None:
    write(tmp_path, "failure.json", **{"class": "RuntimeError", "exit_status": 70, "message": "m"})
    assert judge(tmp_path, 70, oom=True).kind is Kind.OUT_OF_MEMORY
    assert judge(tmp_path, 0, oom=True).kind is Kind.DONE


def test_a_container_that_somebody_removed_may_have_ended_well(tmp_path: Path) -> None:
    assert judge(tmp_path, None).kind is Kind.UNKNOWN
    write(tmp_path, "outcome.json", outcome="ran")
    assert judge(tmp_path, None).kind is Kind.DONE


@pytest.mark.parametrize("kind", [Kind.STOPPED, Kind.TIME_LIMIT, Kind.HANG])
def test_who_ended_it_is_known(tmp_path: Path, kind: Kind) -> None:
    write(tmp_path, "failure.json", **{"class": "Stopped", "exit_status": 143, "step": 7})
    outcome = judge(tmp_path, 143, by_us=kind)
    assert (outcome.kind, outcome.step) == (kind, 7)


def test_ranks_that_failed_without_a_word_are_told_by_their_log(tmp_path: Path) -> None:
    assert judge(tmp_path, 1, ranks=2).kind is Kind.UNKNOWN
    (tmp_path / "log.txt").write_text("torch.distributed.DistBackendError: NCCL error\n")
    assert judge(tmp_path, 1, ranks=2).kind is Kind.COMMUNICATION
