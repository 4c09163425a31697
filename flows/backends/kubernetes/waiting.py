"""Why the pods of a job do not start, in words, and whether waiting can help. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flows.backends.kubernetes.records import PodRecord
from flows.backends.outcome import Kind
from flows.backends.registry import is_away

IMAGE = (
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("ImageInspectError", "RegistryUnavailable"),
)
OF_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")

NEVER = re.compile(r"persistentvolumeclaim \S+ not found|PodSecurity|is forbidden: violates")
ROOM = "no node has room"
TOLD = {
    "FailedCreate": "the cluster refuses its pods",
    "FailedMount": "a volume cannot be mounted",
    "FailedAttachVolume": "a volume cannot be attached",
    "Unschedulable": ROOM,
}
"""Events and reasons besides those of images and containers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """What keeps pods from starting."""

    kind: Kind
    """How the job ends when it has kept them for too long."""
    words: str
    reason: str
    is_room: bool = False
    """True where others may leave: it may take hours and still go well."""


def obstacle_of(reason: str, message: str) -> Obstacle:
    """What a reason of waiting means, with the cluster's own words."""
    if reason in IMAGE:
        return _of_image(reason, message)
    kind, told = Kind.INFRASTRUCTURE, TOLD.get(reason, reason)
    if reason in OF_CONTAINER:
        kind, told = Kind.CONFIG, "its container cannot be made"
    is_room = reason == "Unschedulable" or "exceeded quota" in message
    if NEVER.search(message):
        kind, is_room = Kind.CONFIG, False
    words = f"{told} ({reason}): {_short(message)}".removesuffix(": ")
    return Obstacle(kind=kind, words=words, reason=reason, is_room=is_room)


def _of_image(reason: str, message: str) -> Obstacle:
    may_come = is_away(message)
    hint = (
        "the registry cannot be reached"
        if may_come
        else ("correct the image's name, or name its pull secret in image_pull_secrets")
    )
    words = f"its image cannot be pulled ({reason}): {_short(message)}".removesuffix(": ")
    kind = Kind.INFRASTRUCTURE if may_come else Kind.CONFIG
    # Between two tries the back-off no longer says why; the reason is told once either way.
    return Obstacle(kind=kind, words=f"{words}; {hint}", reason="image")


def obstacles(
    pods: Iterable[PodRecord], events: Iterable[Mapping[str, Any]] = ()
) -> list[Obstacle]:
    """What keeps pods from starting now, each reason once.

    events: about the job and its pods, for what no status tells."""
    waiting = [pod for pod in pods if not pod.has_started and not pod.has_ended]
    found = [obstacle_of(*pod.obstacle) for pod in waiting if pod.obstacle is not None]
    silent = {pod.name for pod in waiting if pod.obstacle is None}
    for event in _last_of_each(events):
        about = event["involvedObject"]
        if event.get("reason") in TOLD and (about["kind"] == "Job" or about["name"] in silent):
            found.append(obstacle_of(event["reason"], event.get("message", "")))
    return list({one.reason: one for one in reversed(found)}.values())[::-1]


def _last_of_each(events: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """The last event of each object: what was in the way before it is so no more."""
    last: dict[tuple[str, str], Mapping[str, Any]] = {}
    for event in sorted(events, key=_time_of):
        about = event["involvedObject"]
        last[about["kind"], about["name"]] = event
    return last.values()


def _time_of(event: Mapping[str, Any]) -> str:
    meta = event.get("metadata") or {}
    # Seconds first: one of them may have microseconds, which sort before a Z.
    found = event.get("lastTimestamp") or event.get("eventTime") or meta.get("creationTimestamp")
    return str(found or "")[:19]


def _short(message: str, most: int = 300) -> str:
    text = " ".join(message.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."
