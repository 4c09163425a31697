"""Runs a stage as a container of a Docker engine: creates it once, finds it again, follows it.

The container outlives the program that started it. Its name holds the key of the submission, and an
engine has each name once, so a flow that was killed and started again follows the existing one.
When it has ended, that is recorded in the run folder and the container is removed."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

from prefect.blocks.abstract import JobBlock

from flows.backends import contact
from flows.backends.base import StageJobRun, find_or_start
from flows.backends.container.client import (
    NOT_STARTED,
    RECORD,
    ContainerClient,
    ContainerState,
    record_container,
    recorded_end,
)
from flows.backends.container.log import ContainerLog
from flows.backends.container.options import ContainerOptions
from flows.backends.container.render import (
    SCRIPT,
    ContainerRequest,
    Host,
    container_name,
    docker_run,
    render_container,
)
from flows.backends.events import record_event
from flows.backends.live_jobs import live
from flows.backends.liveness import Liveness
from flows.backends.outcome import (
    JobEnd,
    Kind,
    Outcome,
    classify_exit,
    of_kind,
    read_failure,
    read_outcome,
    read_tail,
)
from flows.backends.run_folder import HEARTBEAT, LOG, make_run_folder, read_record
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError, InfrastructureError, TrainyardError

TICK_SECONDS = 0.1
AWAY_SECONDS = 60.0
"""How long the engine may be silent while a run follows a container."""
DRAIN_SECONDS = 10.0
"""How long to wait for the last lines after the end."""
DEAF_SECONDS = 1.0
"""How long after its start a container gets no signal: the kernel drops signals that the first
process of a container does not handle yet."""
KILL_SECONDS = 30.0
"""How long a killed container may still exist."""
LOST = 255
"""Exit code of containers that a restarted engine finds dead."""
NOT_RUN = (126, 127)
"""Exit codes of a container whose program cannot be started."""


class ContainerJobRun(StageJobRun):
    """Follows a container; its output goes to the run's logger and to log.txt."""

    def __init__(
        self, block: ContainerJob, client: ContainerClient | None, seen: ContainerState | None
    ) -> None:
        """client: None if the end was already recorded; seen: None if the container is gone."""
        self.name = container_name(block.spec)
        super().__init__(block.spec, self.name)
        self._block = block
        self._client = client
        self._seen = seen
        self._closing = asyncio.Lock()
        self._asking = threading.Lock()
        self._last_answer = time.monotonic()
        self._contact = contact.current()
        self._liveness = Liveness((self.log_path, self._folder / HEARTBEAT))
        self._reader: ContainerLog | None = None
        if client is not None and seen is not None:
            self._read_log()
        live.add(self)

    @property
    def container_id(self) -> str:
        """The engine's id of the container; empty if it is gone."""
        return "" if self._seen is None else self._seen.id

    @property
    def log_path(self) -> Path:
        """All that the job wrote to stdout and stderr."""
        return self._folder / LOG

    # --- waiting ------------------------------------------------------------------------------

    async def _wait_until_ended(self) -> None:
        looked = time.monotonic()
        while not self._has_ended():
            self._raise_stop_failure()
            await asyncio.sleep(TICK_SECONDS)
            since = time.monotonic() - looked
            if since >= (self._block.poll_seconds if self._is_read() else 2 * TICK_SECONDS):
                await asyncio.to_thread(self._ask)
                looked = time.monotonic()
            self._check_times()

    def _ask(self) -> None:
        """Poll its state; InfrastructureError if the engine is silent for AWAY_SECONDS."""
        with self._asking:  # else an older answer might overtake a newer one
            if self._client is None or self._has_ended():
                return
            self._contact.ask()
            try:
                seen = self._client.look(self.name)
            except InfrastructureError as error:
                self._contact.fail(str(error))
                if time.monotonic() - self._last_answer > AWAY_SECONDS:
                    raise
                time.sleep(min(1.0, self._block.poll_seconds))
                return
            self._last_answer = time.monotonic()
            self._contact.answer()
            # Another flow that follows it too may have removed it already.
            self._seen = seen or recorded_end(read_record(self._folder / RECORD, self.name))
            if not self._has_ended() and not self._is_read():
                self._read_log()

    def _is_read(self) -> bool:
        return self._reader is not None and self._reader.is_alive()

    def _read_log(self) -> None:
        assert self._client is not None
        self._reader = ContainerLog(self._client, self.name, self.log_path, self._relay)
        self._reader.start()

    def _has_ended(self) -> bool:
        return self._seen is None or self._seen.has_ended

    def _check_times(self) -> None:
        """Stop the job if its time limit is over or if it is silent for too long."""
        if self._stopping is not None or self._seen is None or self._has_ended():
            return
        limit = self.spec.resources.time_limit_seconds
        if limit is not None and time.time() - self._seen.began > limit:
            self._log.error(
                "%s: exceeded its time limit of %d s; stopping it", self.spec.name, limit
            )
            self.begin_stopping(Kind.TIME_LIMIT)
            return
        self._stop_if_silent(self._liveness.silent_seconds(), self._block.hang_seconds)

    async def _drain(self) -> None:
        """Read the last lines, record the end, remove the container; once."""
        async with self._closing:
            if self._client is None:
                return
            if self._reader is not None:
                await asyncio.to_thread(self._reader.join, DRAIN_SECONDS)
                if self._reader.trouble:
                    self._log.warning("the log is incomplete: %s", self._reader.trouble)
            if self._seen is not None:
                record_container(self._folder, self.name, self._seen)
                try:
                    await asyncio.to_thread(self._client.remove, self.name)
                except TrainyardError as error:  # the job has ended all the same
                    self._log.warning("container %s could not be removed: %s", self.name, error)
            self._client.close()
            self._client = None

    # --- stopping -----------------------------------------------------------------------------

    async def _stop_job(self) -> None:
        """Send SIGTERM (SIGUSR1 at the time limit), so that training saves; after the grace
        SIGKILL. Returns when the engine confirms the end."""
        if self._client is None or self._has_ended():
            await self._drain()
            return
        self._record_stop()
        early = self._seen.began + DEAF_SECONDS - time.time() if self._seen is not None else 0.0
        await asyncio.sleep(min(max(0.0, early), DEAF_SECONDS))
        # torchrun dies of SIGUSR1, and passes SIGTERM on to its ranks.
        is_late = self._stop_reason is Kind.TIME_LIMIT and not self.spec.has_ranks
        number = "SIGUSR1" if is_late else "SIGTERM"
        if not self._was_signalled:
            await asyncio.to_thread(self._client.signal, self.name, number)
            self._record_stop(was_signalled=True)
        await self._wait_until_gone(self.spec.grace_seconds)
        if not self._has_ended():
            await asyncio.to_thread(self._client.signal, self.name, "SIGKILL")
            await self._wait_until_gone(KILL_SECONDS)
        if not self._has_ended():
            raise InfrastructureError(
                f"container {self.name} still exists {KILL_SECONDS:.0f} s after SIGKILL; look at "
                f"the machine of the engine"
            )
        await self._drain()
        await self.fetch_result()  # records the end

    async def _wait_until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._has_ended() and time.monotonic() < deadline:
            await asyncio.sleep(TICK_SECONDS)
            await asyncio.to_thread(self._ask)

    # --- the end ------------------------------------------------------------------------------

    def _end_time(self) -> float | None:
        return None if self._seen is None else self._seen.ended

    def _outcome(self) -> Outcome:
        return classify_container(self.spec, self.name, self._seen, self._stop_reason)


def classify_container(
    spec: LaunchSpec, name: str, state: ContainerState | None, stop_reason: Kind | None
) -> Outcome:
    """The outcome of a container; state: None if the engine no longer knows it."""
    failure = read_failure(spec.run_directory)
    code = None if state is None else state.exit_code
    message = "it was removed" if state is None else state.error
    if code is None and failure is None and read_outcome(spec.run_directory) is not None:
        code = 0  # a successful stage writes it last
    if code in NOT_RUN and failure is None:
        program = (spec.rank_launcher if spec.has_ranks else spec.command)[0]
        message = f"image {spec.image} has no program {program} that can be run"
        return of_kind(spec.name, Kind.CONFIG, message)
    verdict = None
    # Something in it ran out of memory; that may not be what ended it.
    if code and state is not None and state.was_out_of_memory:
        verdict = Kind.OUT_OF_MEMORY
    elif code == LOST:
        verdict = Kind.NODE_FAILURE
        message = message or "the engine or its machine was restarted"
    status = "" if code is None else f"exit status {code}"
    return classify_exit(
        spec.name,
        JobEnd(
            failure=failure,
            verdict=verdict,
            message=", ".join(filter(None, (f"container {name}", status, message))),
            exit_code=code,
            is_of_launcher=spec.has_ranks,
            stop_reason=stop_reason,
            log_tail=read_tail(Path(spec.run_directory, LOG)),
        ),
    )


class ContainerJob(JobBlock[Outcome]):
    """Runs a stage in a container of its own, or follows the container that already runs it."""

    _block_type_name = "Container Job"
    _block_type_slug = "container-job"
    _description = "Runs a stage's own command in a container of a Docker engine."

    spec: LaunchSpec
    options: ContainerOptions = ContainerOptions()
    poll_seconds: float = 5.0
    """Between two polls of a container; when its output ends, it is polled at once."""
    hang_seconds: float | None = None
    """A running container counts as hung after this long without a line in its log."""

    async def trigger(self) -> ContainerJobRun:
        """Find the container of this key, or create and start it. Cancelling this stops the job."""
        return await find_or_start(self.spec, asyncio.to_thread(self._find_or_start))

    def _find_or_start(self) -> ContainerJobRun:
        folder, name = Path(self.spec.run_directory), container_name(self.spec)
        host = Host(user=f"{os.getuid()}:{os.getgid()}", environment=os.environ)
        request = render_container(self.spec, self.options, host)
        record = read_record(folder / RECORD, name)
        if (end := recorded_end(record)) is not None:
            self.logger.info("%s has already ended in container %s", self.spec.name, name)
            return ContainerJobRun(self, None, end)
        client = ContainerClient(self.options.engine)
        try:
            state = client.look(name)
            if state is not None or record is None:  # else it ran and was removed
                state = self._started(client, request, state)
                record_container(folder, name, None)
            return ContainerJobRun(self, client, state)
        except TrainyardError:
            client.close()
            raise

    def _started(
        self, client: ContainerClient, request: ContainerRequest, state: ContainerState | None
    ) -> ContainerState | None:
        """The container, created if there is none, and started."""
        folder, name = Path(self.spec.run_directory), request.name
        if state is None:
            make_run_folder(folder)
            (folder / SCRIPT).write_text(docker_run(request))
            client.create(request, os.environ, self.options.pull == "missing")
            record_event(folder, "submitted", job=name)
            self.logger.info("%s runs in container %s", self.spec.name, name)
            state = client.wait_for(name)
        elif state.key != self.spec.key:
            raise ConfigError(
                f"container {name} exists and was not made by trainyard (its label is "
                f"{state.key!r}); "
                f"remove or rename it"
            )
        else:
            record_event(folder, "reattached", job=name)
            self.logger.info("%s is already container %s; following it", self.spec.name, name)
        if state is not None and state.state == NOT_STARTED:
            try:
                client.start(name)
            except TrainyardError:
                client.remove(name)  # what cannot be started must not be found again
                raise
            state = client.look(name)
        if state is not None:
            record_event(folder, "started", at=state.began, job=name)
        return state
