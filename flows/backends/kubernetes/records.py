"""What Kubernetes says of jobs and pods, as records. Pure.

A Job ends with a condition, `Complete` or `Failed`; a JobSet with `Completed` or `Failed`. Why it
failed is mostly said by its pods: by the condition `DisruptionTarget`, where others took a node or
it was lost; by the state of the container, where it used too much memory; else by an exit code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flows.backends.kubernetes.pod import CONTAINER, INDEX_ANNOTATION
from flows.backends.outcome import Kind

DISRUPTED = {
    "PreemptionByScheduler": Kind.PREEMPTED,
    "EvictionByEvictionAPI": Kind.PREEMPTED,
    "TerminationByKubelet": Kind.PREEMPTED,  # a node that is shut down, or short of something
    "DeletionByTaintManager": Kind.NODE_FAILURE,
    "DeletionByPodGC": Kind.NODE_FAILURE,
}
"""Reasons of `DisruptionTarget`, and what each means."""

ENDED_BY_KUBELET = {
    "DeadlineExceeded": Kind.TIME_LIMIT,
    "Evicted": Kind.PREEMPTED,
    "Preempting": Kind.PREEMPTED,
    "Terminated": Kind.PREEMPTED,
    "NodeShutdown": Kind.PREEMPTED,
    "Shutdown": Kind.PREEMPTED,
    "NodeLost": Kind.NODE_FAILURE,
    "NodeAffinity": Kind.NODE_FAILURE,
    "UnexpectedAdmissionError": Kind.NODE_FAILURE,
    "OutOfcpu": Kind.NODE_FAILURE,
    "OutOfmemory": Kind.NODE_FAILURE,
}
"""Reasons of a pod, where no container says more."""

ENDED_AS = {
    "OOMKilled": Kind.OUT_OF_MEMORY,
    "StartError": Kind.CONFIG,
    "ContainerCannotRun": Kind.CONFIG,
}
"""Reasons of a container that has ended, besides Completed and Error."""

SHORT_OF = re.compile(r"low on resource: *([\w-]+)|exceeds the (?:total )?limit", re.IGNORECASE)

BY_POLICY = re.compile(
    r"for pod \S+/(?P<pod>\S+) failed with exit code (?P<code>\d+)|"
    r"[Pp]od \S+/(?P<disrupted>\S+) has condition DisruptionTarget"
)
"""The message of a Job that its pod failure policy ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """One pod, as it was when it was last seen."""

    name: str
    job: str = ""
    index: int = 0
    """Completion index."""
    phase: str = "Pending"
    has_started: bool = False
    """Its container runs or has run: there is a log."""
    exit_code: int | None = None
    verdict: Kind | None = None
    """What its end means; None where the exit code has to tell, and before its end."""
    words: str = ""
    """Reason and message of its end, for people."""
    obstacle: tuple[str, str] | None = None
    """Reason and message why it does not start."""
    node: str = ""
    created: str = ""
    finished: str = ""

    @property
    def has_ended(self) -> bool:
        """True in a phase that it does not leave."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRecord:
    """A Job or a JobSet."""

    name: str
    uid: str = ""
    verdict: Kind | None = None
    has_ended: bool = False
    has_succeeded: bool = False
    reason: str = ""
    message: str = ""
    is_suspended: bool = False
    is_being_deleted: bool = False
    completed: frozenset[int] = frozenset()
    """Completion indices that are done."""
    failed: frozenset[int] = frozenset()

    @property
    def words(self) -> str:
        """The end, for people."""
        told = "Complete" if self.has_succeeded else self.reason
        return ": ".join(filter(None, (told, self.message)))

    @property
    def culprit(self) -> tuple[str, int | None]:
        """The pod that the failure policy names, and its exit code; empty where it names none."""
        found = BY_POLICY.search(self.message)
        if found is None:
            return "", None
        code = int(found["code"]) if found["code"] else None
        return found["pod"] or found["disrupted"], code


def read_workload(document: Mapping[str, Any]) -> WorkloadRecord:
    """The record of a Job or a JobSet."""
    meta, status = document["metadata"], document.get("status") or {}
    conditions = _conditions(status)
    failed = conditions.get("Failed")
    done = conditions.get("Complete") or conditions.get("Completed")
    told = failed or done or {}
    return WorkloadRecord(
        name=meta["name"],
        uid=meta.get("uid", ""),
        verdict=_verdict_of_job(failed) if failed else Kind.DONE if done else None,
        has_ended=bool(told),
        has_succeeded=bool(done and not failed),
        reason=told.get("reason", ""),
        message=told.get("message", ""),
        is_suspended=bool(document.get("spec", {}).get("suspend")),
        is_being_deleted="deletionTimestamp" in meta,
        completed=frozenset(_indices(status.get("completedIndexes", ""))),
        failed=frozenset(_indices(status.get("failedIndexes", ""))),
    )


def _verdict_of_job(failed: Mapping[str, Any]) -> Kind | None:
    reason, message = failed.get("reason", ""), failed.get("message", "")
    if reason == "DeadlineExceeded" or "DeadlineExceeded" in message:
        return Kind.TIME_LIMIT
    found = BY_POLICY.search(message)
    return Kind.PREEMPTED if found and found["disrupted"] else None


def read_pod(document: Mapping[str, Any]) -> PodRecord:
    """The record of a pod."""
    meta, status = document["metadata"], document.get("status") or {}
    labels, phase = meta.get("labels") or {}, status.get("phase", "Pending")
    state = _container_state(status)
    ended = state.get("terminated")
    conditions = _conditions(status)
    has_failed = phase == "Failed" or bool(ended and ended.get("exitCode"))
    return PodRecord(
        name=meta["name"],
        job=labels.get("batch.kubernetes.io/job-name") or labels.get("job-name", ""),
        index=int((meta.get("annotations") or {}).get(INDEX_ANNOTATION, 0)),
        phase=phase,
        has_started="running" in state or bool(ended and ended.get("startedAt")),
        exit_code=None if ended is None else ended.get("exitCode"),
        verdict=_verdict_of_pod(status, conditions, ended or {}) if has_failed else None,
        words=_words(status, conditions, ended or {}) if has_failed else "",
        obstacle=_obstacle(status, conditions, state) if phase == "Pending" else None,
        node=(document.get("spec") or {}).get("nodeName", ""),
        created=meta.get("creationTimestamp", ""),
        finished=(ended or {}).get("finishedAt") or "",
    )


def _conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Conditions that are true, and of PodScheduled the one that is not."""
    found = status.get("conditions") or ()
    held = {one["type"]: one for one in found if one.get("status") == "True"}
    waiting = {one["type"]: one for one in found if one.get("reason") == "Unschedulable"}
    return {**held, **waiting}


def _container_state(status: Mapping[str, Any]) -> Mapping[str, Any]:
    found = status.get("containerStatuses") or ()
    ours = next((one for one in found if one.get("name") == CONTAINER), None)
    return (ours or {}).get("state") or {}


def _verdict_of_pod(
    status: Mapping[str, Any],
    conditions: Mapping[str, Mapping[str, Any]],
    ended: Mapping[str, Any],
) -> Kind | None:
    if ended.get("reason") in ENDED_AS:
        return ENDED_AS[ended["reason"]]
    disrupted = conditions.get("DisruptionTarget")
    reason = status.get("reason", "")
    message = status.get("message") or (disrupted or {}).get("message") or ""
    if reason == "Evicted" or (disrupted or {}).get("reason") == "TerminationByKubelet":
        short = SHORT_OF.search(message)
        if short is not None:
            return Kind.OUT_OF_MEMORY if short[1] == "memory" else Kind.INFRASTRUCTURE
    if disrupted is not None:
        return DISRUPTED.get(disrupted.get("reason", ""), Kind.PREEMPTED)
    return ENDED_BY_KUBELET.get(reason)


def _words(
    status: Mapping[str, Any],
    conditions: Mapping[str, Mapping[str, Any]],
    ended: Mapping[str, Any],
) -> str:
    disrupted = conditions.get("DisruptionTarget") or {}
    told = [status.get("reason"), disrupted.get("reason")]
    if ended.get("reason") not in (None, "Error", "Completed"):
        told.append(ended["reason"])
    text = status.get("message") or disrupted.get("message")
    if text is None and ended.get("reason") in ("StartError", "ContainerCannotRun"):
        text = ended.get("message")
    return ": ".join(dict.fromkeys(part for part in (*told, text) if part))


def _obstacle(
    status: Mapping[str, Any],
    conditions: Mapping[str, Mapping[str, Any]],
    state: Mapping[str, Any],
) -> tuple[str, str] | None:
    waiting = state.get("waiting") or {}
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return waiting["reason"], waiting.get("message") or ""
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("reason") == "Unschedulable":
        return "Unschedulable", scheduled.get("message") or ""
    return None


def _indices(text: str) -> Iterable[int]:
    """`1,3-5`."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
