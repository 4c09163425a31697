"""How far a stage is, as a bar on Prefect's pages: read from the lines of its log, wherever it
runs."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact

from flows.backends.spec import LaunchSpec
from flows.logs.lines import Lines
from flows.pages.stage_pages import has_pages, page_key, shown

LOG = "log*.txt"
"""Of a job, or of each of its shares."""

LOOK_SECONDS = 2.0
CHUNK_BYTES = 2**20

SAID = (
    re.compile(r"\biteration\s+(?P<done>\d+)/\s*(?P<all>\d+)\b"),
    re.compile(r": (?P<done>[\d,]+) of (?P<all>[\d,]+) \S.* \(\d+ %\), "),
)
"""Lines of training (trainyard/training/logging/console.py), and of trainyard/progress.py."""


def share_done(line: str) -> float | None:
    """What part of its work a job has done by this line; None for a line about something else."""
    for form in SAID:
        found = form.search(line)
        if found and (whole := _count(found["all"])):
            return min(_count(found["done"]) / whole, 1.0)
    return None


def _count(digits: str) -> int:
    return int(digits.replace(",", ""))


class LogProgress:
    """The logs in a run folder, read on from where they were read to; shares count alike."""

    def __init__(self, folder: Path, num_shares: int = 1) -> None:
        self._folder, self._num_shares = folder, max(num_shares, 1)
        self._at: dict[str, int] = {}
        self._lines: dict[str, Lines] = {}
        self._done: dict[str, float] = {}

    def look(self) -> float | None:
        """The part of the work that is done, between 0 and 1; None before anything was said."""
        for path in sorted(self._folder.glob(LOG)):
            if (done := self._said_last(path)) is not None:
                self._done[path.name] = done
        return sum(self._done.values()) / self._num_shares if self._done else None

    def _said_last(self, path: Path) -> float | None:
        """The last that a log says since; None where that is nothing. Of a log of any size, as of
        a job that is found again, a chunk is in memory."""
        lines, last = self._lines.setdefault(path.name, Lines()), None
        with path.open("rb") as file:
            file.seek(self._at.get(path.name, 0))
            while chunk := file.read(CHUNK_BYTES):
                self._at[path.name] = file.tell()
                said = map(share_done, reversed([*lines.feed(chunk)]))
                last = next((done for done in said if done is not None), last)
        return last


@asynccontextmanager
async def progress_shown(spec: LaunchSpec) -> AsyncIterator[None]:
    """A bar while the job inside says how far it is; one that says nothing has none."""
    if not has_pages():
        yield
        return
    num_shares = 1 if spec.shares is None else len(spec.shares.indices)
    bar = _Bar(spec.name, LogProgress(Path(spec.run_directory), num_shares))
    following = asyncio.create_task(bar.follow())
    try:
        yield
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    await shown(bar.look())


class _Bar:
    def __init__(self, job: str, heard: LogProgress) -> None:
        self._job, self._heard = job, heard
        self._artifact: UUID | None = None
        self._percent = -1

    async def follow(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await shown(self.look())

    async def look(self) -> None:
        """Bring the bar up to what was said since."""
        done = await asyncio.to_thread(self._heard.look)
        if done is None or (percent := int(100 * done)) == self._percent:
            return
        if self._artifact is None:
            made: Any = await acreate_progress_artifact(
                float(percent),
                key=page_key(self._job, "progress"),
                description=f"How far `{self._job}` is",
            )
            self._artifact = made
        else:
            await aupdate_progress_artifact(self._artifact, progress=float(percent))
        self._percent = percent
