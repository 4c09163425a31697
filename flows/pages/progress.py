"""Progress bars of stages on Prefect's pages, read from the lines of their logs."""

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
"""The log of a job, or of each of its shares."""

POLL_SECONDS = 2.0
CHUNK_BYTES = 2**20

PROGRESS_LINES = (
    re.compile(r"\biteration\s+(?P<done>\d+)/\s*(?P<all>\d+)\b"),
    re.compile(r": (?P<done>[\d,]{1,30}) of (?P<all>[\d,]{1,30}) \S.{0,200}? \(\d{1,3} %\), "),
)
"""Lines of training (trainyard/training/logging/console.py), and of trainyard/progress.py."""

MOST_CHARS = 1000
"""Of a line that is searched: on long ones the second pattern takes time in the square."""


def share_done(line: str) -> float | None:
    """The share of the work that is done according to a line of progress; None for other lines."""
    for pattern in PROGRESS_LINES:
        found = pattern.search(line, 0, MOST_CHARS)
        if found and (whole := _count(found["all"])):
            return min(_count(found["done"]) / whole, 1.0)
    return None


def _count(digits: str) -> int:
    return int(digits.replace(",", ""))


class LogProgress:
    """The progress of a job, from the logs in its run folder. Each share counts equally."""

    def __init__(self, folder: Path, num_shares: int = 1) -> None:
        self._folder, self._num_shares = folder, max(num_shares, 1)
        self._at: dict[str, int] = {}
        self._lines: dict[str, Lines] = {}
        self._done: dict[str, float] = {}

    def read(self) -> float | None:
        """The share of the work that is done, between 0 and 1; None before the first line."""
        for path in sorted(self._folder.glob(LOG)):
            if (done := self._read_log(path)) is not None:
                self._done[path.name] = done
        return sum(self._done.values()) / self._num_shares if self._done else None

    def _read_log(self, path: Path) -> float | None:
        """The newest progress in the new lines of a log; None without one. Reads it in chunks: the
        log of a job that was found again may be of any size."""
        lines, last = self._lines.setdefault(path.name, Lines()), None
        with path.open("rb") as file:
            file.seek(self._at.get(path.name, 0))
            while chunk := file.read(CHUNK_BYTES):
                self._at[path.name] = file.tell()
                shares = map(share_done, reversed([*lines.feed(chunk)]))
                last = next((done for done in shares if done is not None), last)
        return last


@asynccontextmanager
async def progress_shown(spec: LaunchSpec) -> AsyncIterator[None]:
    """Show a progress bar while the job inside runs, once its log has a line of progress."""
    if not has_pages():
        yield
        return
    num_shares = 1 if spec.shares is None else len(spec.shares.indices)
    bar = _Bar(spec.name, LogProgress(Path(spec.run_directory), num_shares))
    task = asyncio.create_task(bar.follow())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await shown(bar.update())


class _Bar:
    def __init__(self, job: str, log: LogProgress) -> None:
        self._job, self._log = job, log
        self._artifact: UUID | None = None
        self._percent = -1

    async def follow(self) -> None:
        """Update the bar until this is cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await shown(self.update())

    async def update(self) -> None:
        """Set the bar to the progress in the log."""
        done = await asyncio.to_thread(self._log.read)
        if done is None or (percent := int(100 * done)) == self._percent:
            return
        if self._artifact is None:
            artifact: Any = await acreate_progress_artifact(
                float(percent),
                key=page_key(self._job, "progress"),
                description=f"Progress of `{self._job}`",
            )
            self._artifact = artifact
        else:
            await aupdate_progress_artifact(self._artifact, progress=float(percent))
        self._percent = percent
