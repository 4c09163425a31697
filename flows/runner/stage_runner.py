"""Runs the stages of one flow run, one after another or a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from prefect import get_run_logger, runtime

from flows.logs.prefect_handlers import keep_lines
from flows.pages.run_pages import RunPages
from flows.recipes.force import ALL
from flows.recipes.stage_job import StageJob, in_batches, in_shares, joined, num_shares
from flows.recipes.summary import Summary
from flows.runner.cancellation import watch_signals
from flows.runner.limits import StageLimit
from flows.runner.run_lock import record_jobs, run_lock
from flows.runner.stage_task import run_stage_task
from flows.runner.wait_state import shown_waits
from flows.server.outage import tolerate_outages
from flows.yard.links import browsed
from flows.yard.profile import Profile, StageEnvironment, limit_tag
from flows.yard.read_profile import read_profile
from trainyard.artifacts import store
from trainyard.artifacts.manifest import FORCE, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import basename, join, parent

AT_ONCE = {"process": 2, "container": 2}
"""Stages that run at once on one machine, if the flow lets several run."""
AT_ONCE_SCHEDULED = 32
"""The same with a scheduler, which itself decides when each job begins."""

ROUNDS = 4
"""Times as many jobs as run at once: more files than that are put together in one job each."""

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
        force: frozenset[str] = frozenset(),
    ) -> None:
        """alone: wait while another flow run works on the same root. force: names of stages and
        jobs that run even if nothing changed (flows.recipes.force)."""
        self._root = root
        profile = profile or read_profile()
        self._place = profile.stage_environment(root)
        shown = browsed(profile.yard_root(), profile.browse)
        self._pages = RunPages(flow, card, root, self._place.run_folder, shown)
        self._at_once = AT_ONCE.get(self._place.backend, AT_ONCE_SCHEDULED)
        self._slots = asyncio.Semaphore(self._at_once)
        self._limits: dict[str, StageLimit] = {}
        self._alone = alone
        self._force = force
        self._run = str(runtime.flow_run.id or uuid.uuid4().hex)
        self._lock = contextlib.AsyncExitStack()

    async def __aenter__(self) -> StageRunner:
        watch_signals()
        keep_lines()
        tolerate_outages()
        runs = self._place.run_folder
        get_run_logger().info("output: %s; options and logs of stages: %s", self._root, runs)
        try:
            await self._lock.enter_async_context(shown_waits())
            if self._alone:
                await self._lock.enter_async_context(run_lock(self._root, get_run_logger()))
            await self._pages.open()
        except BaseException:
            await self._lock.aclose()
            raise
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

    async def run_for_files(self, jobs: Sequence[StageJob]) -> None:
        """Run the jobs of one stage, one for each of any number of files: many files share a job,
        unless a file is made in shares, or its job is forced by name."""
        alone = [j for j in jobs if self._place.shares_of(j.stage) > 1 or j.name in self._force]
        names = {job.name for job in alone}
        others = [job for job in jobs if job.name not in names]
        await self.run(*alone, *in_batches(others, ROUNDS * self._at_once))

    async def _one(self, job: StageJob) -> Summary:
        async with self._slots:
            place = self._place
            if self._force & {ALL, job.stage, job.name}:
                place = replace(place, environment={**place.environment, FORCE: self._run})
            shares = num_shares(job, place.shares_of(job.stage))
            if shares > 1:
                await self._start(in_shares(job, shares), place)
                job = joined(job, shares)
            summary = await self._start(job, place)
        await self._pages.add(summary)
        return summary

    async def _start(self, job: StageJob, place: StageEnvironment) -> Summary:
        if job.stage not in self._place.limited:
            return await run_stage_task(job, place)
        tag = limit_tag(self._place.yard, job.stage)
        limit = self._limits.setdefault(tag, StageLimit(tag))
        async with limit.apply(job.name, get_run_logger()):
            return await run_stage_task(job, place)

    async def drop_all_but(self, jobs: Sequence[StageJob]) -> None:
        """Remove the parts of files that the corpus no longer has, beside those of these jobs."""
        if not jobs:
            return
        await asyncio.to_thread(remove_other_parts, [j.output.url for j in jobs if j.output])


def remove_other_parts(prefixes: Sequence[str]) -> None:
    """Remove all other artifacts in the folder of these prefixes."""
    ours = {basename(prefix) for prefix in prefixes}
    folder = parent(prefixes[0])
    for name in store.list_folder(folder):
        part = name.removesuffix(f".{MANIFEST}")
        if part == name or part in ours:
            continue
        manifest_url = join(folder, name)
        found = read_manifest(manifest_url)
        store.delete(manifest_url)  # first: without a manifest there is no artifact
        for record in found[0].files if found else ():
            store.delete(join(folder, part + record.path))
        log.warning("removed %s: the corpus no longer has that file", join(folder, part))
