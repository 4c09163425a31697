"""The stages of one flow run, one after another or a few at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from prefect.exceptions import TerminationSignal

from flows.board import Board
from flows.interrupt import heed_interrupt
from flows.job import StageJob
from flows.stage_task import Place, Summary, run_stage_task
from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import basename, is_local, join, local_path, parent

AT_ONCE = 2
"""Stages that run side by side where the flow lets several run at all."""

log = logging.getLogger(__name__)


class Line:
    """Runs jobs, and keeps the board that Prefect's pages show, also of a run that fails."""

    def __init__(self, flow: str, root: str, jobs: Sequence[StageJob], card: str = "") -> None:
        self._place = place_of(root)
        self._board = Board(flow, len(jobs), card)
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> Line:
        _heed_termination()
        heed_interrupt()
        await self._board.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or issubclass(kind, Exception):  # not when it is being cancelled
            await self._board.close(error)

    def documents(self) -> list[dict[str, Any]]:
        """What came of each stage so far, JSON-able."""
        return [summary.to_document() for summary in self._board.summaries]

    async def run(self, *jobs: StageJob | None) -> None:
        """Run jobs that do not wait for each other; when one fails the others are stopped."""
        try:
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    if job is not None:
                        group.create_task(self._one(job))
        except BaseExceptionGroup as failed:
            raise _first(failed) from None

    async def _one(self, job: StageJob) -> Summary:
        async with self._slots:
            summary = await run_stage_task(job, self._place)
        await self._board.add(summary)
        return summary

    async def drop_all_but(self, jobs: Sequence[StageJob]) -> None:
        """Remove parts beside those of these jobs, left by an earlier corpus with other files."""
        await asyncio.to_thread(remove_other_parts, [j.output.url for j in jobs if j.output])


def _heed_termination() -> None:
    """Let a SIGTERM stop the flow also when it comes while the event loop is busy.

    Prefect's handler of the signal raises TerminationSignal wherever the program is. Within a
    callback of the loop nobody awaits that; it ends in the loop's exception handler."""
    loop, flow = asyncio.get_running_loop(), asyncio.current_task()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if flow is not None and isinstance(context.get("exception"), TerminationSignal):
            flow.cancel()
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that stopped the others."""
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def place_of(root: str) -> Place:
    """Where the stages of a root run: here; their run folders lie beside what they make."""
    path = local_path(root) if is_local(root) else Path("yard", basename(root))
    assert path is not None
    return Place(run_folder=str(path.absolute() / ".runs"))


def remove_other_parts(prefixes: Sequence[str]) -> None:
    """Remove the artifacts in these prefixes' folder that are none of them."""
    ours = {basename(prefix) for prefix in prefixes}
    folder = parent(prefixes[0])
    for name in store.list_files(folder):
        part = name.removesuffix(f".{MANIFEST}")
        if "/" in name or part == name or part in ours:
            continue
        manifest_url = join(folder, name)
        found = read_manifest(manifest_url)
        store.delete(manifest_url)  # first: what has none does not exist
        for record in found[0].files if found else ():
            store.delete(join(folder, part + record.path))
        log.warning("removed %s: the corpus has no such file any more", join(folder, part))
