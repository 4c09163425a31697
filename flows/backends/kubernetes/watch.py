"""Watches a submitted job: its objects, its logs, and why it does not start."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

from flows.backends.backoff import pauses
from flows.backends.errors import BackendUnavailableError
from flows.backends.kubernetes.client import (
    GoneError,
    KubernetesClient,
    RefusedError,
    UnavailableError,
)
from flows.backends.kubernetes.manifests import CONTAINER, Document
from flows.backends.kubernetes.options import KubernetesOptions
from flows.backends.kubernetes.records import Obstacle, PodRecord, obstacles
from flows.backends.run_folder import read_record, write_record
from flows.logs.console import Log
from flows.logs.lines import LINE_END, cut_line
from trainyard.errors import ConfigError

FOLLOWED = "followed.json"
"""File of a run folder: how far each pod's log was read, and the sizes of our log files then."""
AGAIN_SECONDS = 1.0
MOST_SECONDS = 15.0
EVENTS_SECONDS = 10.0
"""Between two requests for events."""
MOST_ASKED = 3
"""Jobs, and waiting pods without a reason in their status, whose events are requested."""


class ObjectWatch:
    """The objects of a kind with the key of a submission: listed once, then watched.

    A watch that ends continues from its last version; if that is too old (410), the objects are
    listed again. If the API server stays unavailable, watching ends and the job runs on."""

    def __init__(
        self, client: KubernetesClient, kind: str, key: str, changed: asyncio.Event
    ) -> None:
        """changed: set at each change."""
        self.objects: dict[str, Document] = {}
        self.gone: dict[str, Document] = {}
        """Deleted objects as last seen, by uid: a name may come back."""
        self.is_listed = False
        self._client = client
        self._kind = kind
        self._key = key
        self._changed = changed
        self._version = ""
        self._pauses: Iterator[float] | None = None
        """Since the server last answered."""

    def everything(self) -> list[Document]:
        """Present and deleted objects."""
        return [*self.gone.values(), *self.objects.values()]

    async def run(self) -> None:
        """Watch until cancelled; BackendUnavailableError if the server stays unavailable."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except GoneError:
                self._version = ""
            except UnavailableError as error:
                self._client.contact.fail(str(error))
                await self._pause(error)
            except RefusedError as error:
                if error.status not in (401, 403):
                    raise self._client.error_for(error, "watch", self._kind) from error
                self._version = ""  # listing again renews a token
                await self._pause(error)

    async def _list(self) -> None:
        found, self._version = await self._client.find(self._kind, self._key)
        self._pauses, self.is_listed = None, True
        old = self.objects
        self.objects = {document["metadata"]["name"]: document for document in found}
        present = {document["metadata"]["uid"] for document in found}
        self.gone |= {
            uid: one for one in old.values() if (uid := one["metadata"]["uid"]) not in present
        }
        self._changed.set()

    async def _watch(self) -> None:
        async with aclosing(self._client.watch(self._kind, self._key, self._version)) as changes:
            async for change in changes:
                self._pauses, document = None, change.object
                meta = document["metadata"]
                self._version = meta["resourceVersion"]
                if change.type == "BOOKMARK":
                    continue
                if change.type != "DELETED":
                    self.objects[meta["name"]] = document
                else:
                    self.gone[meta["uid"]] = document
                    there = self.objects.get(meta["name"])
                    if there is not None and there["metadata"]["uid"] == meta["uid"]:
                        del self.objects[meta["name"]]
                self._changed.set()

    async def _pause(self, error: Exception) -> None:
        self._pauses = self._pauses or pauses(self._client.patience_seconds)
        pause = next(self._pauses, None)
        if pause is None:
            raise BackendUnavailableError(
                f"the API server of Kubernetes has been unavailable for "
                f"{self._client.patience_seconds:.0f} s (watching {self._kind}): {error}"
            ) from error
        await asyncio.sleep(pause)


class PodLogs:
    """The logs of all pods of a job: each line once, into log.txt and to a listener.

    Lines carry their time. How far each pod was read is recorded together with the sizes of the
    files, so that the next program continues at that line."""

    def __init__(
        self, client: KubernetesClient, folder: Path, relay: Callable[[str], None]
    ) -> None:
        """relay: gets each line, behind its label."""
        self._client = client
        self._folder = folder
        self._relay = relay
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: set[str] = set()
        self.last_line: float | None = None
        """When the last line came, by time.monotonic()."""
        known = read_record(folder / FOLLOWED) or {"pods": {}, "sizes": {}}
        self._read = {pod: (at, count) for pod, (at, count) in known["pods"].items()}
        """By pod: time of the last line, and number of lines of that time."""
        self._sizes: dict[str, int] = known["sizes"]
        for file, size in self._sizes.items():
            path = folder / file
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)  # written by a program that was killed before recording it

    def follow(self, pod: str, file: str, label: str) -> None:
        """Follow a pod whose container has started, unless it is followed already."""
        if pod not in self._tasks or self._tasks[pod].cancelled():
            self._tasks[pod] = asyncio.create_task(self._follow(pod, file, label))

    def mark_ended(self, pod: str) -> None:
        """Note that a pod has ended or is gone, so its log gets no more lines."""
        self._ended.add(pod)

    async def finish(self, seconds: float) -> None:
        """Wait until all logs are read, at most this many seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds)
        await self.close()

    async def close(self) -> None:
        """Stop following."""
        for task in self._tasks.values():
            task.cancel()
        for one in await asyncio.gather(*self._tasks.values(), return_exceptions=True):
            if isinstance(one, Exception):
                raise one

    async def _follow(self, pod: str, file: str, label: str) -> None:
        wait = AGAIN_SECONDS
        while True:
            had_ended, before, is_whole = pod in self._ended, self._read.get(pod), False
            try:
                await self._read_lines(pod, file, label)
                is_whole = True
            except RefusedError as error:
                if error.status == 404:
                    return  # 400: its container is being created
            except (GoneError, UnavailableError):
                pass
            if had_ended and is_whole:
                return
            has_news = self._read.get(pod) != before or pod in self._ended
            wait = AGAIN_SECONDS if has_news else min(2 * wait, MOST_SECONDS)
            await asyncio.sleep(wait)

    async def _read_lines(self, pod: str, file: str, label: str) -> None:
        last, skip = self._read.get(pod, (0, 0))
        # The server takes whole seconds, so lines of the last second come again.
        since = datetime.fromtimestamp(last // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        async with aclosing(self._client.log(pod, CONTAINER, since if last else "")) as batches:
            async for batch in batches:
                new: list[str] = []
                for line in batch:
                    at, text = split_line(line)
                    if at < last or (at == last and skip > 0):
                        skip -= at == last
                        continue
                    old, number = self._read.get(pod, (0, 0))
                    self._read[pod] = (at, number + 1 if at == old else 1)
                    new += [label + cut_line(part) for part in LINE_END.split(text) if part]
                if new:
                    self._write(file, new)

    def _write(self, file: str, lines: list[str]) -> None:
        self.last_line = time.monotonic()
        with (self._folder / file).open("ab") as log:
            log.write("".join(f"{line}\n" for line in lines).encode())
            self._sizes[file] = log.tell()
        write_record(self._folder / FOLLOWED, {"pods": self._read, "sizes": self._sizes})
        for line in lines:
            self._relay(line)


def split_line(line: bytes) -> tuple[int, str]:
    """Time in nanoseconds since 1970, to the microsecond, and text of a line such as
    `2026-11-21T17:46:00.123456789Z step 3`."""
    stamp, _, text = line.decode(errors="replace").partition(" ")
    at = datetime.fromisoformat(stamp)
    return int(at.timestamp()) * 10**9 + at.microsecond * 1000, text


class StartWatch:
    """Warns why a job does not start, and names the obstacle that lasts too long."""

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
        """All pods have started: forget the obstacles."""
        self._since.clear()
        self._events.clear()

    async def check(
        self, pods: Sequence[PodRecord], jobs: Sequence[str], now: float
    ) -> Obstacle | None:
        """The obstacle for which to stop the job; None while the job may wait."""
        if now - self._asked_at > EVENTS_SECONDS:
            self._asked_at = now
            silent = [pod.name for pod in pods if not pod.has_started and pod.obstacle is None]
            names = [*jobs[:MOST_ASKED], *silent[:MOST_ASKED]]
            try:
                found = [await self._client.events_about(name) for name in names]
                self._events = [event for events in found for event in events]
            except ConfigError as error:  # a role without events: continue without them
                self._log.warning("job %s: %s", self._name, error)
                self._asked_at = math.inf
        current = {one.reason: one for one in obstacles(pods, self._events)}
        for reason, one in current.items():
            if reason not in self._since:
                self._log.warning("job %s does not start: %s", self._name, one.message)
        # Keep the first message of a reason: a later back-off is less specific.
        self._since = {
            reason: self._since.get(reason, (one, now)) for reason, one in current.items()
        }
        for one, since in self._since.values():
            limit = self._options.room_seconds if one.is_room else self._options.broken_seconds
            if limit is not None and now - since > limit:
                self._log.error("job %s did not start in %d s; stopping it", self._name, limit)
                return one
        return None
