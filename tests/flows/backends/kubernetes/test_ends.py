"""Which of many pods is the cause, and what an end with missing facts means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.backends.kubernetes.ends import End, classify_end, end_of, read_ends, write_ends
from flows.backends.kubernetes.records import PodRecord, WorkloadRecord
from flows.backends.outcome import Kind
from flows.backends.spec import LaunchSpec, Resources

FAILED = WorkloadRecord(name="j", has_ended=True, reason="BackoffLimitExceeded", message="limit")


def pod(index: int, **values: object) -> PodRecord:
    return PodRecord(**{"name": f"j-{index}", "index": index, "phase": "Failed", **values})  # type: ignore[arg-type]


def test_the_first_failed_pod_is_the_cause() -> None:
    pods = [
        pod(0, exit_code=143, finished="2026-11-21T10:00:00Z"),
        pod(1, exit_code=1, finished="2026-11-21T10:00:05Z"),
        pod(2, exit_code=1, finished="2026-11-21T10:00:09Z"),
    ]
    end = end_of(None, [FAILED], pods, 3)
    assert end.exit_code == 1
    assert "pod j-1" in end.words


@pytest.mark.parametrize("verdict", [Kind.OUT_OF_MEMORY, Kind.NODE_FAILURE, Kind.PREEMPTED])
def test_reports_of_the_cluster_outrank_exit_codes(verdict: Kind) -> None:
    pods = [pod(0, exit_code=1, finished="2026"), pod(1, verdict=verdict, message="told")]
    end = end_of(None, [FAILED], pods, 2)
    assert (end.verdict, "told" in end.words) == (verdict, True)


def test_the_pod_of_the_failure_policy_is_the_cause_even_if_it_is_gone() -> None:
    text = "Container stage for pod y/j-1 failed with exit code 2 matching FailJob rule at index 1"
    job = WorkloadRecord(name="j", has_ended=True, reason="PodFailurePolicy", message=text)
    earlier = pod(0, exit_code=1, finished="2026-11-21T10:00:00Z")
    named = pod(1, exit_code=2, finished="2026-11-21T10:00:01Z")
    assert end_of(None, [job], [earlier, named], 2).exit_code == 2
    assert end_of(None, [job], [], 2).exit_code == 2


@pytest.mark.parametrize(
    "end",
    [{"exit_code": 70}, {"exit_code": 137, "verdict": Kind.OUT_OF_MEMORY, "message": "OOMKilled"}],
)
@pytest.mark.parametrize("is_last_named", [True, False])
def test_a_replaced_pod_is_not_the_cause(end: dict[str, object], is_last_named: bool) -> None:
    created = "2026-11-21T10:00:00Z"
    evicted = pod(1, name="j-1-aaaaa", verdict=Kind.PREEMPTED, message="gone", created=created)
    last = pod(1, name="j-1-bbbbb", created="2026-11-21T10:05:00Z", **end)
    text = f"Container stage for pod y/{last.name} failed with exit code 70 matching FailJob rule"
    message = text if is_last_named else "limit"
    job = WorkloadRecord(name="j", has_ended=True, reason="PodFailurePolicy", message=message)
    for pods in ([evicted, last], [last, evicted]):
        for index in (None, 1):  # a job of one pod, and a share
            found = end_of(index, [job], pods)
            assert (found.verdict, found.exit_code) == (last.verdict, last.exit_code)
            assert "j-1-bbbbb" in found.words


def test_a_deadline_after_an_eviction_is_a_deadline() -> None:
    evicted = pod(0, name="j-0-aaaaa", verdict=Kind.PREEMPTED, created="2026-11-21T10:00:00Z")
    waiting = pod(0, name="j-0-bbbbb", phase="Pending", created="2026-11-21T10:05:00Z")
    late = WorkloadRecord(name="j", has_ended=True, verdict=Kind.TIME_LIMIT, reason="Deadline")
    assert end_of(None, [late], [evicted, waiting]).verdict is Kind.TIME_LIMIT


def test_a_deleted_job_is_done_if_all_of_its_pods_were() -> None:
    done = [pod(index, phase="Succeeded", exit_code=0) for index in (0, 1)]
    there = WorkloadRecord(name="j")
    assert end_of(None, [there], done, 2).verdict is Kind.DONE
    assert end_of(None, [there], done[:1], 2).verdict is Kind.STOPPED
    assert end_of(None, [], [], 2) == End(words="the cluster no longer knows it")


def test_a_share_can_be_done_although_others_failed() -> None:
    job = WorkloadRecord(name="j", has_ended=True, completed=frozenset({0}))
    pods = [pod(0, phase="Succeeded", exit_code=0), pod(1, exit_code=3)]
    assert end_of(0, [job], pods).verdict is Kind.DONE
    assert end_of(1, [job], pods).exit_code == 3


def test_ends_are_read_as_they_were_written(tmp_path: Path) -> None:
    ends = {None: End(verdict=Kind.PREEMPTED, words="w"), 3: End(exit_code=2)}
    write_ends(tmp_path, ends, Kind.HANG)
    assert read_ends(tmp_path) == (ends, Kind.HANG)
    assert read_ends(tmp_path / "none") is None


# --- the outcome ----------------------------------------------------------------------------------


def spec(folder: Path, nodes: int = 1) -> LaunchSpec:
    wanted = Resources(nodes=nodes)
    return LaunchSpec(name="j", command=("x",), run_directory=str(folder), resources=wanted)


def fail(folder: Path, status: int, name: str = "SomeError") -> None:
    document = {"class": name, "exit_status": status, "message": "it said so", "step": 7}
    (folder / "failure.json").write_text(json.dumps(document))


NODE_LOST = End(verdict=Kind.NODE_FAILURE, words="DeletionByTaintManager")
NO_IMAGE = End(verdict=Kind.CONFIG, words="no image")
NO_PROGRAM = End(verdict=Kind.CONFIG, words="StartError")
NO_DISK = End(verdict=Kind.INFRASTRUCTURE, words="disk")
EVICTED = End(verdict=Kind.INFRASTRUCTURE, words="Evicted")
STOPPED = End(verdict=Kind.STOPPED, exit_code=143)
A_NODE_FAILED = "a node failed (DeletionByTaintManager)"
SILENT = "no output for longer than allowed, so it was ended"


@pytest.mark.parametrize(
    ("report", "nodes", "end", "stop_reason", "kind", "message"),
    [
        # the stage's own report where it is the cause; a lost node goes before it
        ((2, "E"), 2, End(exit_code=1, words="Job failed"), None, Kind.CONFIG, "it said so"),
        ((3, "CommunicationError"), 2, NODE_LOST, None, Kind.NODE_FAILURE, A_NODE_FAILED),
        ((3, "OSError"), 1, EVICTED, None, Kind.INFRASTRUCTURE, "it said so"),
        # what kept it from starting
        (None, 1, NO_IMAGE, Kind.CONFIG, Kind.CONFIG, "no image"),
        (None, 1, NO_DISK, Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE, "disk"),
        # the report of a pod that was replaced is not the end of the one that followed
        ((143, "Stopped"), 1, NO_IMAGE, Kind.CONFIG, Kind.CONFIG, "no image"),
        ((143, "Stopped"), 1, NO_PROGRAM, None, Kind.CONFIG, "StartError"),
        ((143, "Stopped"), 1, NO_DISK, None, Kind.INFRASTRUCTURE, "disk"),
        # ended by ourselves
        (None, 1, STOPPED, Kind.HANG, Kind.HANG, SILENT),
        (None, 1, STOPPED, Kind.STOPPED, Kind.STOPPED, "cancelled"),
    ],
)
def test_outcome_of_an_end(
    tmp_path: Path,
    report: tuple[int, str] | None,
    nodes: int,
    end: End,
    stop_reason: Kind | None,
    kind: Kind,
    message: str,
) -> None:
    if report is not None:
        fail(tmp_path, *report)
    outcome = classify_end(spec(tmp_path, nodes), None, end, stop_reason)
    assert (outcome.kind, outcome.message) == (kind, message)
    if nodes == 2:
        assert outcome.step == 7


def test_the_last_file_of_a_stage_decides_the_outcome_of_a_forgotten_job(tmp_path: Path) -> None:
    assert classify_end(spec(tmp_path), None, End(words="forgotten"), None).kind is Kind.UNKNOWN
    (tmp_path / "outcome.json").write_text('{"outcome": "ran"}')
    assert classify_end(spec(tmp_path), None, End(words="forgotten"), None).kind is Kind.DONE
