"""The logs of all pods of a job: into log.txt, and to whoever listens, each line once.

Each line comes with its time. How far each pod was read is noted together with the sizes of the
files, so that a program that follows after this one goes on at the very line."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.backends.kubernetes.api import AwayError, GoneError, RefusedError
from flows.backends.kubernetes.client import KubernetesClient
from flows.backends.kubernetes.pod import CONTAINER
from flows.backends.notes import write_note
from flows.logs.lines import LINE_END

MEMORY = "followed.json"
AGAIN_SECONDS = 1.0
MOST_SECONDS = 15.0

Say = Callable[[str], None]
"""Told each line, behind its label."""


class PodLogs:
    """Follows pods as they start."""

    def __init__(self, client: KubernetesClient, folder: Path, say: Say) -> None:
        self._client = client
        self._folder = folder
        self._say = say
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: set[str] = set()
        self._read: dict[str, tuple[int, int]] = {}
        self._sizes: dict[str, int] = {}
        self.last_line: float | None = None
        """When the last line came, by time.monotonic()."""
        self._recall()

    def follow(self, pod: str, file: str, label: str) -> None:
        """Follow a pod whose container has started, unless it is followed; one whose following was
        cancelled, from where that was."""
        if pod not in self._tasks or self._tasks[pod].cancelled():
            self._tasks[pod] = asyncio.create_task(self._follow(pod, file, label))

    def note_end(self, pod: str) -> None:
        """The pod has ended or is gone: no more comes than what its log holds."""
        self._ended.add(pod)

    async def finish(self, seconds: float) -> None:
        """Until all logs are read, or the time is over."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds)
        await self.close()

    async def close(self) -> None:
        """Follow no more."""
        for task in self._tasks.values():
            task.cancel()
        for one in await asyncio.gather(*self._tasks.values(), return_exceptions=True):
            if isinstance(one, Exception):
                raise one

    # --- one pod ------------------------------------------------------------------------------

    async def _follow(self, pod: str, file: str, label: str) -> None:
        wait = AGAIN_SECONDS
        while True:
            had_ended = pod in self._ended
            before = self._read.get(pod)
            try:
                await self._read_on(pod, file, label)
                is_whole = True
            except (RefusedError, GoneError) as error:
                if isinstance(error, RefusedError) and error.status == 404:
                    return
                is_whole = False  # 400: its container is only being made
            except AwayError:
                is_whole = False
            if had_ended and is_whole:
                return
            wait = AGAIN_SECONDS if self._read.get(pod) != before else min(2 * wait, MOST_SECONDS)
            await asyncio.sleep(wait if pod not in self._ended else AGAIN_SECONDS)

    async def _read_on(self, pod: str, file: str, label: str) -> None:
        last, skip = self._read.get(pod, (0, 0))
        async with aclosing(self._client.log(pod, CONTAINER, _since(last))) as batches:
            async for batch in batches:
                new: list[str] = []
                for line in batch:
                    at, text = split_line(line)
                    if at < last or (at == last and skip > 0):
                        skip -= at == last
                        continue
                    old, number = self._read.get(pod, (0, 0))
                    self._read[pod] = (at, number + 1 if at == old else 1)
                    new += [label + part for part in LINE_END.split(text) if part]
                if new:
                    self._write(file, new)

    def _write(self, file: str, lines: list[str]) -> None:
        self.last_line = time.monotonic()
        with (self._folder / file).open("ab") as log:
            log.write("".join(f"{line}\n" for line in lines).encode())
            self._sizes[file] = log.tell()
        self._remember()
        for line in lines:
            self._say(line)

    # --- memory -------------------------------------------------------------------------------

    def _remember(self) -> None:
        write_note(self._folder / MEMORY, {"pods": self._read, "sizes": self._sizes})

    def _recall(self) -> None:
        try:
            known: dict[str, Any] = json.loads((self._folder / MEMORY).read_text())
        except FileNotFoundError:
            return
        self._read = {pod: (at, count) for pod, (at, count) in known["pods"].items()}
        self._sizes = known["sizes"]
        for file, size in self._sizes.items():
            path = self._folder / file
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)  # written, and the program killed before it was noted


def split_line(line: bytes) -> tuple[int, str]:
    """Nanoseconds since 1970, and the text behind them."""
    stamp, _, text = line.decode(errors="replace").partition(" ")
    return nanoseconds(stamp), text


def nanoseconds(stamp: str) -> int:
    """Of `2026-11-21T17:46:00.123456789Z`, or with another zone; datetime knows only micro."""
    whole, point, rest = stamp.partition(".")
    if not point:
        return int(datetime.fromisoformat(stamp).timestamp()) * 10**9
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    seconds = int(datetime.fromisoformat(whole + rest[len(digits) :]).timestamp())
    return seconds * 10**9 + int(digits[:9].ljust(9, "0"))


def _since(at: int) -> str:
    """Whole seconds, which is all that the server takes; empty from the beginning."""
    if not at:
        return ""
    return datetime.fromtimestamp(at // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
