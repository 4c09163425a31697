"""What Kubernetes says of ends and of waiting, in its own shapes, and what each means."""

from __future__ import annotations

from typing import Any

import pytest

from flows.backends.kubernetes.records import obstacle_of, obstacles, read_pod, read_workload
from flows.backends.outcome import Kind


def pod(phase: str = "Failed", name: str = "merge-k-1-0-x", **status: Any) -> dict[str, Any]:
    notes = {"batch.kubernetes.io/job-completion-index": "3"}
    meta = {"name": name, "uid": "u", "annotations": notes, "labels": {"job-name": "merge-k-1"}}
    return {"metadata": meta, "spec": {"nodeName": "node-7"}, "status": {"phase": phase, **status}}


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "istio-proxy", "state": {"running": {}}}, {"name": "stage", "state": state}]


def ended(code: int, reason: str = "Error") -> list[dict[str, Any]]:
    return container(
        terminated={
            "exitCode": code,
            "reason": reason,
            "startedAt": "2026-11-21T10:00:00Z",
            "finishedAt": "2026-11-21T10:05:00Z",
        }
    )


def disrupted(reason: str, message: str = "") -> list[dict[str, Any]]:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    return [{"type": "Ready", "status": "False"}, condition]


EVICTED = "The node was low on resource: {}. Threshold quantity: 100Mi, available: 4Mi."
TOO_LARGE = 'Usage of EmptyDir volume "temporary" exceeds the limit "50Gi".'


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ({"containerStatuses": ended(2)}, None),
        ({"containerStatuses": ended(137, "OOMKilled")}, Kind.OUT_OF_MEMORY),
        ({"containerStatuses": ended(128, "StartError")}, Kind.CONFIG),
        ({"conditions": disrupted("PreemptionByScheduler")}, Kind.PREEMPTED),
        ({"conditions": disrupted("EvictionByEvictionAPI")}, Kind.PREEMPTED),
        ({"conditions": disrupted("DeletionByTaintManager")}, Kind.NODE_FAILURE),
        ({"conditions": disrupted("DeletionByPodGC")}, Kind.NODE_FAILURE),
        ({"conditions": disrupted("TerminationByKubelet", "node shutdown")}, Kind.PREEMPTED),
        ({"conditions": disrupted("SomethingNew")}, Kind.PREEMPTED),
        ({"reason": "Evicted", "message": EVICTED.format("memory")}, Kind.OUT_OF_MEMORY),
        ({"reason": "Evicted", "message": EVICTED.format("ephemeral-storage")}, "disk"),
        ({"reason": "Evicted", "message": TOO_LARGE}, "disk"),
        ({"reason": "DeadlineExceeded"}, Kind.TIME_LIMIT),
        ({"reason": "NodeLost"}, Kind.NODE_FAILURE),
    ],
)
def test_why_a_pod_ended(status: dict[str, Any], kind: Kind | str | None) -> None:
    record = read_pod(pod(**status))
    assert record.verdict is (Kind.INFRASTRUCTURE if kind == "disk" else kind)
    assert (record.index, record.node) == (3, "node-7")
    assert record.has_ended


def test_a_sidecar_is_not_the_stage() -> None:
    record = read_pod(pod("Running", containerStatuses=ended(2)))
    assert (record.exit_code, record.has_ended, record.has_started) == (2, False, True)
    assert not read_pod(pod("Pending", containerStatuses=container(waiting={}))).has_started


def workload(kind: str, reason: str = "", message: str = "", **status: Any) -> dict[str, Any]:
    condition = {"type": kind, "status": "True", "reason": reason, "message": message}
    earlier = {"type": "FailureTarget", "status": "True", "reason": reason}
    meta = {"name": "merge-k-1", "uid": "u"}
    return {"metadata": meta, "spec": {}, "status": {"conditions": [earlier, condition], **status}}


def test_a_job_that_is_about_to_fail_has_not_ended() -> None:
    assert not read_workload(workload("FailureTarget", "PodFailurePolicy")).has_ended
    assert not read_workload({"metadata": {"name": "a"}}).has_ended


@pytest.mark.parametrize("done", ["Complete", "Completed"])
def test_successful_jobs_and_jobsets_are_done(done: str) -> None:
    record = read_workload(workload(done))
    assert (record.has_succeeded, record.verdict) == (True, Kind.DONE)


def test_the_failure_policy_names_the_pod_and_what_it_met() -> None:
    by_code = (
        "Container stage for pod yard/merge-k-1-0-x failed with exit code 70 matching FailJob rule "
        "at index 1"
    )
    record = read_workload(workload("Failed", "PodFailurePolicy", by_code))
    assert (record.culprit, record.verdict) == (("merge-k-1-0-x", 70), None)
    taken = "Pod yard/merge-k-1-1-y has condition DisruptionTarget matching FailJob rule at index 0"
    record = read_workload(workload("Failed", "PodFailurePolicy", taken))
    assert (record.culprit, record.verdict) == (("merge-k-1-1-y", None), Kind.PREEMPTED)
    late = read_workload(workload("Failed", "DeadlineExceeded", "was active longer than"))
    assert late.verdict is Kind.TIME_LIMIT


def test_indices_of_shares_are_read_from_ranges() -> None:
    record = read_workload(workload("Failed", "FailedIndexes", completedIndexes="0,2-4,9"))
    assert record.completed == {0, 2, 3, 4, 9}


# --- what does not start --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "message", "kind", "is_room"),
    [
        ("ErrImagePull", "manifest unknown", Kind.CONFIG, False),
        ("ErrImagePull", "unauthorized: authentication required", Kind.CONFIG, False),
        ("ErrImagePull", "dial tcp: i/o timeout", Kind.INFRASTRUCTURE, False),
        ("ErrImagePull", "toomanyrequests: rate limit", Kind.INFRASTRUCTURE, False),
        ("InvalidImageName", "", Kind.CONFIG, False),
        ("CreateContainerConfigError", 'secret "a" not found', Kind.CONFIG, False),
        ("Unschedulable", "0/9 nodes: 9 Insufficient nvidia.com/gpu.", Kind.INFRASTRUCTURE, True),
        ("Unschedulable", 'persistentvolumeclaim "y" not found', Kind.CONFIG, False),
        ("FailedCreate", "pods is forbidden: exceeded quota: q", Kind.INFRASTRUCTURE, True),
        ("FailedCreate", 'is forbidden: violates PodSecurity "restricted"', Kind.CONFIG, False),
        ("FailedMount", "MountVolume.SetUp failed", Kind.INFRASTRUCTURE, False),
    ],
)
def test_reasons_to_wait_are_sorted(reason: str, message: str, kind: Kind, is_room: bool) -> None:
    found = obstacle_of(reason, message)
    assert (found.kind, found.is_room) == (kind, is_room)
    assert message in found.message


def waiting(reason: str, message: str) -> dict[str, Any]:
    state = container(waiting={"reason": reason, "message": message})
    return pod("Pending", containerStatuses=state)


def test_one_reason_of_many_pods_is_logged_once() -> None:
    pods = [read_pod(waiting("ErrImagePull", "not found")) for _ in range(128)]
    (only,) = obstacles(pods)
    assert "image_pull_secrets" in only.message


def event(reason: str, at: str, kind: str = "Pod", name: str = "merge-k-1-0-x") -> dict[str, Any]:
    about = {"kind": kind, "name": name}
    return {"involvedObject": about, "reason": reason, "lastTimestamp": at, "message": "m"}


def test_an_event_counts_until_another_comes_after_it() -> None:
    pods = [read_pod(pod("Pending", containerStatuses=container(waiting={})))]
    mount, pull = event("FailedMount", "2026-11-21T10:00:00Z"), event("Pulling", "2026-11-21T10:01")
    (found,) = obstacles(pods, [mount])
    assert found.reason == "FailedMount"
    assert obstacles(pods, [pull, mount]) == []
    assert obstacles([], [event("FailedCreate", "2026", "Job", "merge-k-1")])
    assert obstacles([read_pod(pod("Running", containerStatuses=ended(0)))], [mount]) == []
