"""Runs the stages of one flow run, one after another or a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from prefect import get_run_logger

from flows.pages.run_pages import RunPages
from flows.recipes.stage_job import StageJob, in_shares, joined
from flows.recipes.summary import Summary
from flows.runner.cancellation import watch_signals
from flows.runner.limits import StageLimit
from flows.runner.run_lock import record_jobs, run_lock
from flows.runner.stage_task import run_stage_task
from flows.yard.links import browsed
from flows.yard.profile import Profile, limit_tag
from flows.yard.read_profile import read_profile
from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import basename, join, parent

AT_ONCE = {"process": 2, "container": 2}
"""Stages that run at once on one machine, if the flow lets several run."""
AT_ONCE_SCHEDULED = 32
"""The same for a scheduler, which decides itself when each one begins."""

log = logging.getLogger(__name__)


class StageRunner:
    """Runs jobs, and updates the run's pages in Prefect also if it fails."""

    def __init__(
        self,
        flow: str,
        root: str,
        card: str = "",
        *,
        profile: Profile | None = None,
        alone: bool = True,
    ) -> None:
        """alone: wait while another flow run works on the same root."""
        self._root = root
        profile = profile or read_profile()
        self._place = profile.stage_environment(root)
        shown = browsed(profile.yard_root(), profile.browse)
        self._pages = RunPages(flow, card, root, self._place.run_folder, shown)
        self._slots = asyncio.Semaphore(AT_ONCE.get(self._place.backend, AT_ONCE_SCHEDULED))
        self._limits: dict[str, StageLimit] = {}
        self._alone = alone
        self._lock = contextlib.AsyncExitStack()

    async def __aenter__(self) -> StageRunner:
        watch_signals()
        if self._alone:
            await self._lock.enter_async_context(run_lock(self._root, get_run_logger()))
        await self._pages.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None or issubclass(kind, Exception):  # not when it is being cancelled
                await self._pages.close(error)
        finally:
            await self._lock.aclose()

    async def expect(self, jobs: Sequence[StageJob]) -> None:
        """Announce the stages that will run. Call it under the lock: while this run waited for it,
        another run may have changed the files that the recipe names."""
        self._pages.expect(jobs)
        if self._alone:
            await asyncio.to_thread(record_jobs, self._root, [job.document for job in jobs])

    def documents(self) -> list[dict[str, Any]]:
        """The summary of each stage so far, JSON-able."""
        return [summary.to_document() for summary in self._pages.summaries]

    async def run(self, *jobs: StageJob | None) -> None:
        """Run jobs side by side; when one fails, stop the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    if job is not None:
                        group.create_task(self._one(job))
        except BaseExceptionGroup as failed:
            error: BaseException = failed
            while isinstance(
                error, BaseExceptionGroup
            ):  # the failure for which the others were stopped
                error = error.exceptions[0]
            raise error from None

    async def _one(self, job: StageJob) -> Summary:
        async with self._slots:
            shares = self._place.shares_of(job.stage)
            if shares > 1:
                await self._start(in_shares(job, shares))
                job = joined(job, shares)
            summary = await self._start(job)
        await self._pages.add(summary)
        return summary

    async def _start(self, job: StageJob) -> Summary:
        if job.stage not in self._place.limited:
            return await run_stage_task(job, self._place)
        tag = limit_tag(self._place.yard, job.stage)
        limit = self._limits.setdefault(tag, StageLimit(tag))
        async with limit.apply(job.name, get_run_logger()):
            return await run_stage_task(job, self._place)

    async def drop_all_but(self, jobs: Sequence[StageJob]) -> None:
        """Remove the parts of files that the corpus no longer has, beside those of these jobs."""
        if not jobs:
            return
        await asyncio.to_thread(remove_other_parts, [j.output.url for j in jobs if j.output])


def remove_other_parts(prefixes: Sequence[str]) -> None:
    """Remove all other artifacts in the folder of these prefixes."""
    ours = {basename(prefix) for prefix in prefixes}
    folder = parent(prefixes[0])
    for name in store.list_files(folder):
        part = name.removesuffix(f".{MANIFEST}")
        if "/" in name or part == name or part in ours:
            continue
        manifest_url = join(folder, name)
        found = read_manifest(manifest_url)
        store.delete(manifest_url)  # first: without a manifest there is no artifact
        for record in found[0].files if found else ():
            store.delete(join(folder, part + record.path))
        log.warning("removed %s: the corpus no longer has that file", join(folder, part))
