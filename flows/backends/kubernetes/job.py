"""Runs a stage as a job of Kubernetes: creates it once, finds it again, follows it to its end.

The job outlives the program that created it. Its label and name hold the key of the submission, so
a flow that was killed and started again follows the existing job instead of creating another."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import yaml
from prefect.blocks.abstract import JobBlock

from flows.backends.backoff import SubmitBackoff
from flows.backends.base import StageJobRun, find_or_start
from flows.backends.events import record_event
from flows.backends.kubernetes.client import KubernetesClient, RefusedError
from flows.backends.kubernetes.ends import End, classify_end, end_of, read_ends, write_ends
from flows.backends.kubernetes.manifests import (
    KEY_LABEL,
    MANIFESTS,
    REPLICATED,
    Document,
    render_kubernetes,
    resource_name,
)
from flows.backends.kubernetes.options import KubernetesOptions, Variant
from flows.backends.kubernetes.records import (
    Obstacle,
    PodRecord,
    WorkloadRecord,
    read_pod,
    read_workload,
)
from flows.backends.kubernetes.watch import ObjectWatch, PodLogs, StartWatch
from flows.backends.live_jobs import live, wait_uncancelled
from flows.backends.liveness import Liveness
from flows.backends.outcome import Kind, Outcome, join_shares
from flows.backends.run_folder import (
    HEARTBEAT,
    SUBMITTED,
    log_name,
    make_run_folder,
    read_record,
    share_folder,
    write_record,
)
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError, InfrastructureError, TrainyardError

KINDS = {"job": "Job", "jobset": "JobSet"}
ROOM_PAUSE_SECONDS = 30.0
"""Between two tries to create a job that a quota refuses."""
TICK_SECONDS = 1.0
LATE_SECONDS = 10.0
"""How long to wait for pods to end after their Job, and for the last lines."""
KILL_SECONDS = 120.0
"""How long after the grace a deleted job may still exist."""


class KubernetesJob(JobBlock[Outcome]):
    """Runs a stage in pods of a cluster, or follows the job that already runs it."""

    _block_type_name = "Kubernetes Training Job"
    _block_type_slug = "kubernetes-training-job"
    _description = "Runs a stage's own command in pods of Kubernetes."

    spec: LaunchSpec
    options: KubernetesOptions = KubernetesOptions()
    hang_seconds: float | None = None
    """A job whose pods all run counts as hung after this long without a line in any log."""

    def client(self) -> KubernetesClient:
        """The client for the cluster."""
        options = self.options
        return KubernetesClient(options.namespace, options.kubeconfig, options.context)

    async def trigger(self) -> KubernetesJobRun:
        """Find the job of this key, or create it as soon as the namespace's quota has room.
        Cancelling this stops the job."""
        backoff = SubmitBackoff(self.spec.name, self.options.room_seconds, self.logger)
        return await backoff.submit(
            lambda: find_or_start(self.spec, self._open()), ROOM_PAUSE_SECONDS
        )

    async def _open(self) -> KubernetesJobRun:
        folder, name = Path(self.spec.run_directory), resource_name(self.spec)
        submitted = read_record(folder / SUBMITTED, name)
        client = await self.client().open()
        try:
            if submitted is None:
                kind = await self._find_or_create(client, folder)
                record = {"name": name, "kind": kind, "namespace": self.options.namespace}
                write_record(folder / SUBMITTED, record)
            else:
                kind = submitted["kind"]
                if read_ends(folder) is None:
                    self._record_reattached()
            return KubernetesJobRun(self, client, kind)
        except BaseException:
            await client.close()
            raise

    async def _find_or_create(self, client: KubernetesClient, folder: Path) -> str:
        """The kind of the job that has the key now."""
        name = resource_name(self.spec)
        variant = await variant_to_make(client, self.options, self.spec.resources.nodes)
        found: Document | None = None
        # JobSet may have been installed since an earlier program created a Job.
        variants: tuple[Variant, ...] = (variant,) if variant == "job" else (variant, "job")
        for one in variants:
            listed, _ = await client.find(KINDS[one], self.spec.key)
            ours = [document for document in listed if document["metadata"]["name"] == name]
            if ours and found is None:
                variant, found = one, ours[0]
        documents = render_kubernetes(
            self.spec, replace(self.options, variant=variant), secrets.token_hex(16)
        )
        make_run_folder(folder)
        (folder / MANIFESTS).write_text(yaml.safe_dump_all(documents, sort_keys=False))
        *services, workload = documents
        for service in services:
            await client.create(service)
        try:
            made = found or await client.create(workload)
        except TrainyardError as error:
            if isinstance(error.__cause__, RefusedError):  # else the job may exist
                for service in services:
                    await self._delete_service(client, service["metadata"]["name"])
            raise
        for service in services:  # the cluster deletes it together with the job
            owner = {**workload, "metadata": made["metadata"]}
            await client.own("Service", service["metadata"]["name"], owner)
        kind = str(workload["kind"])
        if found is not None:
            self._record_reattached()
        else:
            record_event(folder, "submitted", job=name)
            where = f"{kind} {self.options.namespace}/{name}"
            self.logger.info("created %s as %s", self.spec.name, where)
        return kind

    async def _delete_service(self, client: KubernetesClient, name: str) -> None:
        try:
            await client.delete("Service", name)
        except TrainyardError as error:  # the refusal of the job is the error to raise
            self.logger.warning("Service %s could not be deleted: %s", name, error)

    def _record_reattached(self) -> None:
        name = resource_name(self.spec)
        record_event(self.spec.run_directory, "reattached", job=name)
        self.logger.info("%s is already job %s; following it", self.spec.name, name)


async def variant_to_make(
    client: KubernetesClient, options: KubernetesOptions, nodes: int
) -> Variant:
    """The variant of a job of so many nodes; ConfigError if the cluster lacks the one asked for."""
    if options.variant == "job" or nodes == 1:
        return "job"
    is_installed = await client.serves_jobsets()
    if options.variant == "jobset" and not is_installed:
        raise ConfigError(
            "Kubernetes option variant: the cluster has no JobSet (its controller is not "
            "installed); use 'auto' or 'job'"
        )
    return "jobset" if is_installed else "job"


class KubernetesJobRun(StageJobRun):
    """Follows a job of the cluster; its log goes to the run's logger and to log.txt.

    Watches keep what the cluster reports in memory. This class evaluates it at each change, and
    once a second."""

    def __init__(self, block: KubernetesJob, client: KubernetesClient, kind: str) -> None:
        self.name = name = resource_name(block.spec)
        super().__init__(block.spec, name, block.logger)
        self._options = block.options
        self._hang_seconds = block.hang_seconds
        self._client = client
        self._kind = kind
        shares = self.spec.shares
        self._shares: Sequence[int | None] = (None,) if shares is None else shares.indices
        """By completion index."""
        self._ends: dict[int | None, End] = {}
        self._ended_time: float | None = None
        self._state = ""
        self._start = StartWatch(client, block.options, name, self._log)
        self._liveness = Liveness(self._folder / share_folder(i) / HEARTBEAT for i in self._shares)
        self._obstacle: Obstacle | None = None
        self._evaluating = asyncio.Lock()
        self._changed = asyncio.Event()
        self._workloads = ObjectWatch(client, kind, self.spec.key, self._changed)
        self._pods = ObjectWatch(client, "Pod", self.spec.key, self._changed)
        self._logs = PodLogs(client, self._folder, self._relay)
        self._watching: dict[ObjectWatch, asyncio.Task[None]] = {}
        self._is_closed = False
        if (known := read_ends(self._folder)) is not None:
            self._ends, self._stop_reason = known
        else:
            self._watch()
        live.add(self)

    def _watch(self) -> None:
        """Start the watches that do not run. When a program ends, asyncio cancels all of its tasks;
        the job is still followed to its end."""
        for one in (self._workloads, self._pods):
            if (task := self._watching.get(one)) is None or task.cancelled():
                self._watching[one] = asyncio.create_task(one.run())

    # --- waiting ------------------------------------------------------------------------------

    async def wait_for_completion(self) -> None:  # type: ignore[override]  # a Logger, says the base
        """Wait until the job has ended, as in the base class, and close all watches."""
        async with self._closed_after():
            await super().wait_for_completion()

    async def stop(self) -> None:
        """Stop the job, wait until the cluster confirms the end, and close all watches."""
        async with self._closed_after():
            await super().stop()

    @asynccontextmanager
    async def _closed_after(self) -> AsyncIterator[None]:
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

    async def _wait_until_ended(self) -> None:
        while not self._has_ended() and self._stopping is None:
            await self._step()
            await self._check_health()

    async def _drain(self) -> None:
        """Do nothing: the log was complete when the end was recorded."""

    def _has_ended(self) -> bool:
        return bool(self._ends)

    async def _step(self) -> None:
        """Wait for a change, or a second, and evaluate it."""
        if not self._is_closed:
            self._watch()
        self._changed.clear()
        change = asyncio.create_task(self._changed.wait())
        try:
            tasks = [change, *self._watching.values()]
            await asyncio.wait(tasks, timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
        for task in self._watching.values():
            if task.done() and not task.cancelled():
                task.result()  # raises why the watch ended
        async with self._evaluating:  # waiting and stopping may both be here
            if self._is_closed or self._has_ended():
                return
            if self._workloads.is_listed and self._pods.is_listed:
                await self._evaluate()

    async def _evaluate(self) -> None:
        """Follow the logs of started pods, log the state, and record the end once it has come."""
        pods, jobs = self._pod_records(), self._job_records()
        present = [pod for pod in pods if pod.name in self._pods.objects]
        for pod in pods:
            if pod.has_started or pod.has_ended:
                share = None if self.spec.shares is None else self._shares[pod.index]
                label = f"{pod.index}: " if self.spec.resources.nodes > 1 else ""
                self._logs.follow(pod.name, log_name(share), label)
            if pod.has_ended or pod.name not in self._pods.objects:
                self._logs.mark_ended(pod.name)
        self._log_state(jobs, present)
        is_running = any(pod.has_started for pod in present)
        record_event(self._folder, "started" if is_running else "queued", job=self.name)
        has_ended = any(job.has_ended for job in jobs) and self._stopping is None
        if self.name not in self._workloads.objects or has_ended:
            await self._record_ends()

    def _log_state(self, jobs: Sequence[WorkloadRecord], present: Sequence[PodRecord]) -> None:
        parts = []
        if any(job.is_suspended and not job.has_ended for job in jobs):
            parts.append(f"suspended, waits in queue {self._options.queue or '(no queue)'}")
        phases = [pod.phase for pod in present]
        parts += [f"{phases.count(one)} {one.lower()}" for one in sorted(set(phases))]
        parts += [job.summary for job in jobs if job.has_ended]
        state = ", ".join(parts) or "no pod yet"
        if state != self._state:
            self._state = state
            self._log.info("job %s: %s", self.name, state)

    async def _record_ends(self) -> None:
        """Record how the job ended once its log is complete; delete a successful job."""
        self._ended_time = time.time()
        deadline = time.monotonic() + LATE_SECONDS
        while time.monotonic() < deadline and any(
            pod.has_started and not pod.has_ended
            for pod in map(read_pod, self._pods.objects.values())
        ):
            await asyncio.sleep(TICK_SECONDS / 4)
        pods, jobs = self._pod_records(), self._job_records()
        for pod in pods:
            self._logs.mark_ended(pod.name)
        await self._logs.finish(LATE_SECONDS)
        if self._kind == "JobSet":  # its Job has the reason
            found, _ = await self._client.find("Job", self.spec.key)
            jobs = [*map(read_workload, found), *jobs]
        nodes = self.spec.resources.nodes
        ends = {
            share: end_of(None if share is None else index, jobs, pods, nodes)
            for index, share in enumerate(self._shares)
        }
        if (why := self._obstacle) is not None:
            ends = dict.fromkeys(self._shares, End(verdict=why.kind, words=why.message))
        write_ends(self._folder, ends, self._stop_reason)
        self._ends = ends
        is_done = all(end.verdict is Kind.DONE for end in ends.values())
        if is_done and self._options.delete_after_success:
            try:
                await self._client.delete(self._kind, self.name)
            except TrainyardError as error:  # the cluster deletes it after keep_seconds
                self._log.warning("job %s was not deleted: %s", self.name, error)

    def _pod_records(self) -> list[PodRecord]:
        return [read_pod(document) for document in self._pods.everything()]

    def _job_records(self) -> list[WorkloadRecord]:
        return [read_workload(document) for document in self._workloads.everything()]

    async def _check_health(self) -> None:
        """Stop a job that does not start or that is silent for too long."""
        if self.is_stopping_or_ended or not self._pods.is_listed:
            return
        pods = [read_pod(document) for document in self._pods.objects.values()]
        wanted = 1 if self.spec.shares is not None else self.spec.resources.nodes
        if len(pods) >= wanted and all(pod.has_started or pod.has_ended for pod in pods):
            self._start.forget()
            silent = self._liveness.silent_seconds(self._logs.last_line)
            self._stop_if_silent(silent, self._hang_seconds)
            return
        self._liveness.renew()
        job = self.name if self._kind == "Job" else f"{self.name}-{REPLICATED}-0"
        self._obstacle = await self._start.check(pods, [job], time.monotonic())
        if self._obstacle is not None:
            self.begin_stopping(self._obstacle.kind)

    # --- the end ------------------------------------------------------------------------------

    async def _stop_job(self) -> None:
        """Delete the job, so that its pods save within their grace; wait until it is gone."""
        if self._has_ended():
            return
        self._record_stop()
        await self._client.delete(self._kind, self.name)
        deadline = time.monotonic() + self.spec.grace_seconds + KILL_SECONDS
        while not self._has_ended():
            await self._step()
            if time.monotonic() > deadline:
                pods = map(read_pod, self._pods.objects.values())
                nodes = {pod.node for pod in pods if pod.node}
                namespace = self._options.namespace
                raise InfrastructureError(
                    f"job {namespace}/{self.name} still exists {KILL_SECONDS:.0f} s after its "
                    f"grace, on {', '.join(sorted(nodes)) or 'no node'}; look at its pods (kubectl "
                    f"-n {namespace} get pods -l {KEY_LABEL}={self.spec.key} -o wide)"
                )
        self._log.info("job %s was stopped", self.name)

    def _end_time(self) -> float | None:
        return self._ended_time

    def _outcome(self) -> Outcome:
        ends = self._ends.items()
        outcomes = {i: classify_end(self.spec, i, end, self._stop_reason) for i, end in ends}
        return join_shares(self.spec.name, outcomes)
