"""Signs of a job that does not start: told at once, and a reason to end it when they last."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flows.backends.kubernetes.client import KubernetesClient
from flows.backends.kubernetes.options import KubernetesOptions
from flows.backends.kubernetes.pod import Document
from flows.backends.kubernetes.records import PodRecord
from flows.backends.kubernetes.waiting import Obstacle, obstacles
from flows.logs.console import Log
from trainyard.errors import ConfigError

EVENTS_SECONDS = 10.0
ASKED = 3
"""So many jobs, and pods that wait without a word in their status, are asked about."""


class Start:
    """What keeps a job from starting, told at once and ended when it lasts too long."""

    def __init__(
        self, client: KubernetesClient, options: KubernetesOptions, name: str, log: Log
    ) -> None:
        self._client = client
        self._options = options
        self._name = name
        self._log = log
        self._since: dict[str, tuple[Obstacle, float]] = {}
        self._events: list[Document] = []
        self._asked_at = -math.inf

    def forget(self) -> None:
        """All of it has started."""
        self._since.clear()
        self._events.clear()

    async def check(
        self, pods: Sequence[PodRecord], jobs: Sequence[str], now: float
    ) -> Obstacle | None:
        """What the job is to be ended for; None while it may wait."""
        if now - self._asked_at > EVENTS_SECONDS:
            self._asked_at = now
            silent = [pod.name for pod in pods if not pod.has_started and pod.obstacle is None]
            asked = [*jobs[:ASKED], *silent[:ASKED]]
            await self._ask(asked)
        in_way = {one.reason: one for one in obstacles(pods, self._events)}
        new = [one for reason, one in in_way.items() if reason not in self._since]
        for one in new:
            self._log.warning("job %s does not start: %s", self._name, one.words)
        # What was said first stays: a back-off says less than the error before it.
        self._since = {
            reason: self._since.get(reason, (one, now)) for reason, one in in_way.items()
        }
        for one, since in self._since.values():
            limit = self._options.room_seconds if one.is_room else self._options.broken_seconds
            if limit is not None and now - since > limit:
                self._log.error("job %s did not start in %d s: ending it", self._name, limit)
                return one
        return None

    async def _ask(self, names: Sequence[str]) -> None:
        try:
            found = [await self._client.events_about(name) for name in names]
        except ConfigError as error:  # a role without them: the rest goes on without, too
            self._log.warning("job %s: %s", self._name, error)
            self._asked_at = math.inf
            return
        self._events = [event for events in found for event in events]
