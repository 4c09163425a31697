"""Parses what Kubernetes reports about jobs and pods: ends, and reasons for not starting. Pure.

A Job ends with the condition `Complete` or `Failed`, a JobSet with `Completed` or `Failed`. The
reason of a failure is mostly in the pods: the condition `DisruptionTarget` if a node was lost or
preempted, the container's state if it ran out of memory, else an exit code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flows.backends.errors import is_registry_unavailable
from flows.backends.kubernetes.manifests import CONTAINER, INDEX_ANNOTATION
from flows.backends.outcome import Kind

DISRUPTED = {
    "PreemptionByScheduler": Kind.PREEMPTED,
    "EvictionByEvictionAPI": Kind.PREEMPTED,
    "TerminationByKubelet": Kind.PREEMPTED,  # node shutdown or pressure
    "DeletionByTaintManager": Kind.NODE_FAILURE,
    "DeletionByPodGC": Kind.NODE_FAILURE,
}
"""Reasons of `DisruptionTarget`."""

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
"""Reasons of a pod whose container gives none."""

ENDED_AS = {
    "OOMKilled": Kind.OUT_OF_MEMORY,
    "StartError": Kind.CONFIG,
    "ContainerCannotRun": Kind.CONFIG,
}
"""Reasons of an ended container besides Completed and Error."""

SHORT_OF = re.compile(r"low on resource: *([\w-]+)|exceeds the (?:total )?limit", re.IGNORECASE)

BY_POLICY = re.compile(
    r"for pod [^\s/]+/(?P<pod>[^\s/]+) failed with exit code (?P<code>\d+)|"
    r"[Pp]od [^\s/]+/(?P<disrupted>[^\s/]+) has condition DisruptionTarget"
)
"""Message of a Job that was ended by its pod failure policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """One pod, as last seen."""

    name: str
    index: int = 0
    """Completion index."""
    phase: str = "Pending"
    has_started: bool = False
    """Whether its container runs or has run, so that there is a log."""
    exit_code: int | None = None
    verdict: Kind | None = None
    """What its end means; None before the end, or if the exit code decides."""
    message: str = ""
    """Reason and message of its end."""
    obstacle: tuple[str, str] | None = None
    """Reason and message why it has not started."""
    node: str = ""
    created: str = ""
    finished: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it is in a final phase."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRecord:
    """A Job or a JobSet."""

    name: str
    verdict: Kind | None = None
    has_ended: bool = False
    has_succeeded: bool = False
    reason: str = ""
    message: str = ""
    is_suspended: bool = False
    completed: frozenset[int] = frozenset()
    """Completion indices that are done."""

    @property
    def summary(self) -> str:
        """Reason and message of its end."""
        reason = "Complete" if self.has_succeeded else self.reason
        return ": ".join(filter(None, (reason, self.message)))

    @property
    def culprit(self) -> tuple[str, int | None]:
        """The pod that the failure policy names, and its exit code; empty if it names none."""
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
    end = failed or done or {}
    return WorkloadRecord(
        name=meta["name"],
        verdict=_verdict_of_job(failed) if failed else Kind.DONE if done else None,
        has_ended=bool(end),
        has_succeeded=bool(done and not failed),
        reason=end.get("reason", ""),
        message=end.get("message", ""),
        is_suspended=bool(document.get("spec", {}).get("suspend")),
        completed=frozenset(_indices(status.get("completedIndexes", ""))),
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
    phase = status.get("phase", "Pending")
    state = _container_state(status)
    ended = state.get("terminated") or {}
    conditions = _conditions(status)
    has_failed = phase == "Failed" or bool(ended.get("exitCode"))
    return PodRecord(
        name=meta["name"],
        index=int((meta.get("annotations") or {}).get(INDEX_ANNOTATION, 0)),
        phase=phase,
        has_started="running" in state or bool(ended.get("startedAt")),
        exit_code=ended.get("exitCode"),
        verdict=_verdict_of_pod(status, conditions, ended) if has_failed else None,
        message=_message(status, conditions, ended) if has_failed else "",
        obstacle=_obstacle(status, conditions, state) if phase == "Pending" else None,
        node=(document.get("spec") or {}).get("nodeName", ""),
        created=meta.get("creationTimestamp", ""),
        finished=ended.get("finishedAt") or "",
    )


def _conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Conditions that are true, and a PodScheduled that is false."""
    found = status.get("conditions") or ()
    return {
        one["type"]: one
        for one in found
        if one.get("status") == "True" or one.get("reason") == "Unschedulable"
    }


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
    disrupted = conditions.get("DisruptionTarget") or {}
    reason = status.get("reason", "")
    message = status.get("message") or disrupted.get("message") or ""
    if reason == "Evicted" or disrupted.get("reason") == "TerminationByKubelet":
        short = SHORT_OF.search(message)
        if short is not None:
            return Kind.OUT_OF_MEMORY if short[1] == "memory" else Kind.INFRASTRUCTURE
    if disrupted:
        return DISRUPTED.get(disrupted.get("reason", ""), Kind.PREEMPTED)
    return ENDED_BY_KUBELET.get(reason)


def _message(
    status: Mapping[str, Any],
    conditions: Mapping[str, Mapping[str, Any]],
    ended: Mapping[str, Any],
) -> str:
    disrupted = conditions.get("DisruptionTarget") or {}
    reasons = [status.get("reason"), disrupted.get("reason")]
    if ended.get("reason") not in (None, "Error", "Completed"):
        reasons.append(ended["reason"])
    text = status.get("message") or disrupted.get("message")
    if text is None and ended.get("reason") in ("StartError", "ContainerCannotRun"):
        text = ended.get("message")
    return ": ".join(dict.fromkeys(part for part in (*reasons, text) if part))


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


def _indices(text: str) -> Iterator[int]:
    """`1,3-5`."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


# --- what does not start --------------------------------------------------------------------------

IMAGE = (
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("ImageInspectError", "RegistryUnavailable"),
)
OF_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")

NEVER = re.compile(r"persistentvolumeclaim \S+ not found|PodSecurity|is forbidden: violates")
MESSAGES = {
    "FailedCreate": "the cluster refuses its pods",
    "FailedMount": "a volume cannot be mounted",
    "FailedAttachVolume": "a volume cannot be attached",
    "Unschedulable": "no node has room",
}
"""Events and reasons other than those of images and containers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why pods do not start."""

    kind: Kind
    """How the job ends if it lasts too long."""
    message: str
    reason: str
    is_room: bool = False
    """Whether other jobs may free what is missing, even hours later."""


def obstacle_of(reason: str, message: str) -> Obstacle:
    """The obstacle that a reason of waiting means, with the cluster's own message."""
    text = " ".join(message.split())
    text = text if len(text) <= 300 else f"{text[:297]}..."
    kind, what, hint = Kind.INFRASTRUCTURE, MESSAGES.get(reason, reason), ""
    is_room = reason == "Unschedulable" or "exceeded quota" in message
    if reason in IMAGE:
        what, hint = "its image cannot be pulled", "; the registry cannot be reached"
        if not is_registry_unavailable(message):
            kind = Kind.CONFIG
            hint = "; correct the image's name, or name its pull secret in image_pull_secrets"
    elif reason in OF_CONTAINER:
        kind, what = Kind.CONFIG, "its container cannot be created"
    if NEVER.search(message):
        kind, is_room = Kind.CONFIG, False
    words = f"{what} ({reason}): {text}".removesuffix(": ") + hint
    # Image errors alternate with a back-off that gives no cause: one reason for both.
    reason = "image" if reason in IMAGE else reason
    return Obstacle(kind=kind, message=words, reason=reason, is_room=is_room)


def obstacles(
    pods: Iterable[PodRecord], events: Iterable[Mapping[str, Any]] = ()
) -> list[Obstacle]:
    """Why pods do not start now, each reason once.

    events: about the job and its pods, for causes that their status does not report. Only the last
    event of an object counts."""
    waiting = [pod for pod in pods if not pod.has_started and not pod.has_ended]
    found = [obstacle_of(*pod.obstacle) for pod in waiting if pod.obstacle is not None]
    silent = {pod.name for pod in waiting if pod.obstacle is None}
    objects = {}
    for event in sorted(events, key=_time_of):
        about = event["involvedObject"]
        objects[about["kind"], about["name"]] = event
    for (about_kind, about_name), event in objects.items():
        if event.get("reason") in MESSAGES and (about_kind == "Job" or about_name in silent):
            found.append(obstacle_of(event["reason"], event.get("message", "")))
    return list({one.reason: one for one in reversed(found)}.values())[::-1]


def _time_of(event: Mapping[str, Any]) -> str:
    meta = event.get("metadata") or {}
    # Whole seconds: eventTime has microseconds, which sort before a Z.
    found = event.get("lastTimestamp") or event.get("eventTime") or meta.get("creationTimestamp")
    return str(found or "")[:19]
