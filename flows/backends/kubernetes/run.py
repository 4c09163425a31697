"""A job of Kubernetes that waits, runs or has ended: watched, listened to, stopped.

The watches keep what the cluster says in memory; what it means is looked at here, whenever there is
news and once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from flows.backends.base import StageJobRun
from flows.backends.ending import join_shares
from flows.backends.events import note
from flows.backends.kubernetes.client import KubernetesClient
from flows.backends.kubernetes.evidence import End, decide, end_of, read_ends, write_ends
from flows.backends.kubernetes.logs import PodLogs
from flows.backends.kubernetes.manifests import resource_name
from flows.backends.kubernetes.options import KubernetesOptions
from flows.backends.kubernetes.records import PodRecord, WorkloadRecord, read_pod, read_workload
from flows.backends.kubernetes.signs import Start
from flows.backends.kubernetes.waiting import Obstacle
from flows.backends.kubernetes.watch import Watched
from flows.backends.live_jobs import live, wait_uncancelled
from flows.backends.liveness import Liveness
from flows.backends.outcome import Kind, Outcome
from flows.backends.run_folder import HEARTBEAT, log_name, share_folder
from flows.backends.spec import LaunchSpec
from flows.logs.console import Log
from trainyard.errors import InfrastructureError, TrainyardError

TICK_SECONDS = 1.0
LATE_SECONDS = 10.0
"""So long pods may take to end after their Job, and the last lines to come."""
KILL_SECONDS = 120.0
"""By then, after the grace, a deleted job is gone."""


class KubernetesJobRun(StageJobRun):
    """A job; its log goes to the run's logger and to log.txt."""

    def __init__(
        self,
        spec: LaunchSpec,
        options: KubernetesOptions,
        hang_seconds: float | None,
        client: KubernetesClient,
        kind: str,
        log: Log,
    ) -> None:
        self.name = resource_name(spec)
        super().__init__(spec, self.name, log)
        self._options = options
        self._hang_seconds = hang_seconds
        self._client = client
        self._kind = kind
        shares = spec.shares
        self._shares: Sequence[int | None] = (None,) if shares is None else shares.indices
        """By completion index."""
        self._ends: dict[int | None, End] = {}
        self._ended_time: float | None = None
        self._told = ""
        self._start = Start(client, options, self.name, log)
        self._signs = Liveness(self._folder / share_folder(i) / HEARTBEAT for i in self._shares)
        self._ended_for: Obstacle | None = None
        self._looking = asyncio.Lock()
        self._news = asyncio.Event()
        self._workloads = Watched(client, kind, spec.key, self._news)
        self._pods = Watched(client, "Pod", spec.key, self._news)
        self._children: Watched | None = None
        if kind == "JobSet":
            self._children = Watched(client, "Job", spec.key, self._news)
        self._logs = PodLogs(client, self._folder, self._say)
        self._watching: dict[Watched, asyncio.Task[None]] = {}
        self._is_closed = False
        if (known := read_ends(self._folder)) is not None:
            self._ends, self._ended_by_us = known
        else:
            self._watch()
        live.add(self)

    def _watch(self) -> None:
        """Watch what is not watched. That may be everything: a program that ends, as one whose flow
        was cancelled, first cancels all of its tasks; the job is seen to its end all the same."""
        for one in (self._workloads, self._pods, self._children):
            if one is not None and ((task := self._watching.get(one)) is None or task.cancelled()):
                self._watching[one] = asyncio.create_task(one.run())

    # --- waiting ------------------------------------------------------------------------------

    async def wait_for_completion(self) -> None:  # type: ignore[override]  # a Logger, says the base
        """Until the job has ended. Being cancelled ends the job; any other end of the waiting,
        such as an API server that stays away, leaves it to be followed again."""
        async with self._closed_after():
            await super().wait_for_completion()

    async def stop(self) -> None:
        """End the job, and wait until the cluster confirms it. Nothing is watched after that, also
        where nobody has waited for it."""
        async with self._closed_after():
            await super().stop()

    async def _until_ended(self) -> None:
        while not self._has_ended() and self._stopping is None:
            await self._step()
            await self._look_for_trouble()

    async def _hear_the_end(self) -> None:
        """All of it was heard when its end was kept."""

    async def _step(self) -> None:
        """Wait for news, or a second; take it in."""
        if not self._is_closed:
            self._watch()
        self._news.clear()
        news = asyncio.create_task(self._news.wait())
        try:
            tasks = [news, *self._watching.values()]
            await asyncio.wait(tasks, timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        for task in self._watching.values():
            if task.done() and not task.cancelled():
                task.result()  # raises why it watches no more
        async with self._looking:  # who waits and who stops may both be here
            if self._is_closed or self._has_ended():
                return
            if self._workloads.is_listed and self._pods.is_listed:
                self.was_answered = True
                await self._take_in()

    async def _take_in(self) -> None:
        """Follow the logs of pods that have started; look whether this is the end."""
        pods, jobs = self._pod_records(), self._job_records()
        for pod in pods:
            if pod.has_started or pod.has_ended:
                share = None if self.spec.shares is None else self._shares[pod.index]
                label = f"{pod.index}: " if self.spec.resources.nodes > 1 else ""
                self._logs.follow(pod.name, log_name(share), label)
            is_there = pod.name in self._pods.objects
            if pod.has_ended or not is_there:
                self._logs.note_end(pod.name)
        self._tell(jobs, pods)
        is_running = any(read_pod(one).has_started for one in self._pods.objects.values())
        note(self._folder, "started" if is_running else "queued", job=self.name)
        has_ended = any(job.has_ended for job in jobs) and self._stopping is None
        if self.name not in self._workloads.objects or has_ended:
            await self._keep_end()

    async def _keep_end(self) -> None:
        """Take down how it ended, when all of its log is there."""
        self._ended_time = time.time()
        deadline = self._now() + LATE_SECONDS
        while self._now() < deadline and self._is_any_left():
            await asyncio.sleep(TICK_SECONDS / 4)
        for pod in self._pod_records():
            self._logs.note_end(pod.name)
        await self._logs.finish(LATE_SECONDS)
        ends = {share: self._end_of(index) for index, share in enumerate(self._shares)}
        write_ends(self._folder, ends, self._ended_by_us)
        self._ends = ends
        is_done = all(end.verdict is Kind.DONE for end in ends.values())
        if is_done and self._options.delete_after_success:
            await self._remove()

    async def _remove(self) -> None:
        try:
            await self._client.delete(self._kind, self.name)
        except TrainyardError as error:  # it went well all the same, and has a time to live
            self._log.warning("job %s could not be removed: %s", self.name, error)

    def _is_any_left(self) -> bool:
        """True while a pod of an ended job still ends."""
        records = map(read_pod, self._pods.objects.values())
        return any(pod.has_started and not pod.has_ended for pod in records)

    def _end_of(self, index: int) -> End:
        if self._ended_for is not None:
            return End(verdict=self._ended_for.kind, words=self._ended_for.words)
        pods, jobs = self._pod_records(), self._job_records()
        if self._children is not None:  # of a JobSet: they know more of why
            jobs = [*map(read_workload, self._children.everything()), *jobs]
        if self.spec.shares is None:
            return end_of(None, jobs, pods, self.spec.resources.nodes)
        return end_of(index, jobs, pods)

    @asynccontextmanager
    async def _closed_after(self) -> AsyncIterator[None]:
        """Nothing is watched, followed or connected any more, however this ends."""
        try:
            yield
        finally:
            await wait_uncancelled(asyncio.create_task(self._close()))

    async def _close(self) -> None:
        self._is_closed = True
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        await self._logs.close()
        await self._client.close()
        live.discard(self)

    def _has_ended(self) -> bool:
        return bool(self._ends)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # --- what the cluster says ------------------------------------------------------------------

    def _pod_records(self) -> list[PodRecord]:
        return [read_pod(document) for document in self._pods.everything()]

    def _job_records(self) -> list[WorkloadRecord]:
        return [read_workload(document) for document in self._workloads.everything()]

    def _tell(self, jobs: Sequence[WorkloadRecord], pods: Sequence[PodRecord]) -> None:
        parts = []
        if any(job.is_suspended and not job.has_ended for job in jobs):
            parts.append(f"suspended, waits in queue {self._options.queue or '(no queue)'}")
        phases = [pod.phase for pod in pods if pod.name in self._pods.objects]
        parts += [f"{phases.count(one)} {one.lower()}" for one in sorted(set(phases))]
        for job in jobs:
            if job.has_ended:
                parts.append(job.words)
            elif job.is_being_deleted:
                parts.append("being deleted")
        text = ", ".join(parts) or "no pod yet"
        if text != self._told:
            self._told = text
            self._log.info("job %s: %s", self.name, text)

    async def _look_for_trouble(self) -> None:
        if self.is_being_stopped or not self._pods.is_listed:
            return
        pods = [read_pod(document) for document in self._pods.objects.values()]
        wanted = 1 if self.spec.shares is not None else self.spec.resources.nodes
        begun = [pod.has_started or pod.has_ended for pod in pods]
        if all(begun) and len(begun) >= wanted:
            self._start.forget()
            silent = self._signs.silent_seconds(self._logs.last_line)
            self._end_if_silent(silent, self._hang_seconds)
            return
        self._signs.renew()
        jobs = [self.name] if self._children is None else [*self._children.objects]
        self._ended_for = await self._start.check(pods, jobs, self._now())
        if self._ended_for is not None:
            self._end(self._ended_for.kind)

    # --- stopping -------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Delete the job: its pods save within the grace; until the cluster confirms that they
        are gone."""
        if self._has_ended():
            return
        self._note_ending()
        await self._client.delete(self._kind, self.name)
        deadline = self._now() + self.spec.grace_seconds + KILL_SECONDS
        while not self._has_ended():
            await self._step()
            if self._now() > deadline:
                raise InfrastructureError(self._stuck_words())
        self._log.info("job %s was stopped", self.name)

    def _stuck_words(self) -> str:
        nodes = {pod.node for pod in map(read_pod, self._pods.objects.values()) if pod.node}
        where = f" on {', '.join(sorted(nodes))}" if nodes else ""
        namespace = self._options.namespace
        return (
            f"job {namespace}/{self.name} is still there {KILL_SECONDS:.0f} s after its grace"
            f"{where}; look at its nodes (kubectl -n {namespace} get pods -l "
            f"trainyard/key={self.spec.key} -o wide)"
        )

    # --- the end --------------------------------------------------------------------------------

    def _ended_at(self) -> float | None:
        return self._ended_time

    def _outcome(self) -> Outcome:
        outcomes = {
            share: decide(self.spec, share, end, self._ended_by_us)
            for share, end in self._ends.items()
        }
        if self.spec.shares is None:
            return outcomes[None]
        shares = {index: one for index, one in outcomes.items() if index is not None}
        return join_shares(self.spec.name, shares)
