"""A stage as a container of a Docker engine: made once, found again, followed to its end.

The container outlives whoever started it. Its name holds the key of the submission, and an engine
has each name once, so a flow that was killed and started again follows the container that is there.
When its end is known that is noted in the run folder, and the container removed."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

from prefect.blocks.abstract import JobBlock

from flows.backends.base import StageJobRun, when_found
from flows.backends.container.client import NOT_STARTED, ContainerClient, ContainerState
from flows.backends.container.ending import judge_container
from flows.backends.container.log import ContainerLog
from flows.backends.container.note import NOTE, end_noted, note_container
from flows.backends.container.options import ContainerOptions
from flows.backends.container.render import (
    SCRIPT,
    ContainerRequest,
    Host,
    container_name,
    docker_run,
    render_container,
)
from flows.backends.events import note
from flows.backends.live_jobs import live
from flows.backends.liveness import Liveness
from flows.backends.notes import read_note
from flows.backends.outcome import Kind, Outcome
from flows.backends.run_folder import HEARTBEAT, LOG
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError, InfrastructureError, TrainyardError

TICK_SECONDS = 0.1
AWAY_SECONDS = 60.0
"""So long the engine may not answer while a container is followed."""
DRAIN_SECONDS = 10.0
"""So long the last lines may take after the end."""
DEAF_SECONDS = 1.0
"""So long after its start the first process may not listen yet, and the kernel drops what a first
process does not listen to."""
KILL_SECONDS = 30.0
"""By then a killed container is gone."""


class ContainerJobRun(StageJobRun):
    """A container, running or ended; its output goes to the run's logger and to log.txt."""

    def __init__(
        self, block: ContainerJob, client: ContainerClient | None, look: ContainerState | None
    ) -> None:
        """client: None when its end was noted before; look: None when it is gone."""
        self.name = container_name(block.spec)
        super().__init__(block.spec, self.name)
        self._block = block
        self._client = client
        self._look = look
        self._closing = asyncio.Lock()
        self._asking = threading.Lock()
        self._last_answer = time.monotonic()
        self._signs = Liveness((self.log_path, self._folder / HEARTBEAT))
        self._listener: ContainerLog | None = None
        if client is not None and look is not None:
            self._listen()
        live.add(self)

    @property
    def container_id(self) -> str:
        """The engine's id of it; empty when it is gone."""
        return "" if self._look is None else self._look.id

    @property
    def log_path(self) -> Path:
        """Everything that the job wrote to stdout and stderr."""
        return self._folder / LOG

    # --- waiting ------------------------------------------------------------------------------

    async def _until_ended(self) -> None:
        looked = time.monotonic()
        while not self._has_ended():
            self._check_stopping()
            await asyncio.sleep(TICK_SECONDS)
            since = time.monotonic() - looked
            if since >= (self._block.poll_seconds if self._is_heard() else 2 * TICK_SECONDS):
                await asyncio.to_thread(self._ask)
                looked = time.monotonic()
            self._check_times()

    def _ask(self) -> None:
        """Look at it; InfrastructureError when the engine has been away for too long."""
        with self._asking:  # else an older answer might come after a newer one
            if self._client is None or self._has_ended():
                return
            try:
                look = self._client.look(self.name)
            except InfrastructureError as error:
                if time.monotonic() - self._last_answer > AWAY_SECONDS:
                    raise
                self._log.warning("%s; asking again", error)
                time.sleep(min(1.0, self._block.poll_seconds))
                return
            self._last_answer, self.was_answered = time.monotonic(), True
            # Another flow that follows it too may have been quicker, and removed it.
            self._look = look or end_noted(read_note(self._folder / NOTE, self.name))
            if not self._has_ended() and not self._is_heard():
                self._listen()

    def _is_heard(self) -> bool:
        return self._listener is not None and self._listener.is_alive()

    def _has_ended(self) -> bool:
        return self._look is None or self._look.has_ended

    def _check_times(self) -> None:
        """Tell one to stop whose time is over, or that has said nothing for too long."""
        if self._stopping is not None or self._look is None or self._has_ended():
            return
        limit = self.spec.resources.time_limit_seconds
        if limit is not None and time.time() - self._look.began > limit:
            self._log.error("%s: its %d s are over: ending it", self.spec.name, limit)
            self._end(Kind.TIME_LIMIT)
            return
        self._end_if_silent(self._signs.silent_seconds(), self._block.hang_seconds)

    # --- listening ----------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._client is not None
        self._listener = ContainerLog(self._client, self.name, self.log_path, self._say)
        self._listener.start()

    async def _hear_the_end(self) -> None:
        """Hear the last lines, note the end, remove the container; once."""
        async with self._closing:
            if self._client is None:
                return
            if self._listener is not None:
                await asyncio.to_thread(self._listener.join, DRAIN_SECONDS)
                if self._listener.trouble:
                    self._log.warning("the log is not whole: %s", self._listener.trouble)
            if self._look is not None:
                note_container(self._folder, self.name, self._look)
                await asyncio.to_thread(self._remove, self._client)
            self._client.close()
            self._client = None

    def _remove(self, client: ContainerClient) -> None:
        try:
            client.remove(self.name)
        except TrainyardError as error:  # the job is done nevertheless
            self._log.warning("container %s is left: %s", self.name, error)

    # --- stopping -----------------------------------------------------------------------------

    async def _stop(self) -> None:
        """SIGTERM (SIGUSR1 when its time is over), so that training saves; after the grace
        SIGKILL, until the engine confirms it."""
        if self._client is None or self._has_ended():
            await self._hear_the_end()
            return
        self._note_ending()
        early = self._look.began + DEAF_SECONDS - time.time() if self._look is not None else 0.0
        await asyncio.sleep(min(max(0.0, early), DEAF_SECONDS))
        # torchrun, which starts ranks, dies of SIGUSR1; SIGTERM it hands on to them.
        is_late = self._ended_by_us is Kind.TIME_LIMIT and not self.spec.has_ranks
        number = "SIGUSR1" if is_late else "SIGTERM"
        if not self._was_told:
            await asyncio.to_thread(self._client.signal, self.name, number)
            self._note_ending(is_told=True)
        await self._wait_until_gone(self.spec.grace_seconds)
        if not self._has_ended():
            await asyncio.to_thread(self._client.signal, self.name, "SIGKILL")
            await self._wait_until_gone(KILL_SECONDS)
        if not self._has_ended():
            raise InfrastructureError(
                f"container {self.name} is still there {KILL_SECONDS:.0f} s after SIGKILL; look "
                f"at the machine of the engine"
            )
        await self._hear_the_end()
        await self.fetch_result()  # notes the end

    async def _wait_until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._has_ended() and time.monotonic() < deadline:
            await asyncio.sleep(TICK_SECONDS)
            await asyncio.to_thread(self._ask)

    # --- the end ------------------------------------------------------------------------------

    def _ended_at(self) -> float | None:
        return None if self._look is None else self._look.ended

    def _outcome(self) -> Outcome:
        look = self._look
        code = None if look is None else look.exit_code
        is_oom = look is not None and look.was_out_of_memory
        words = look.error if look is not None else "somebody removed it"
        return judge_container(self.spec, self.name, code, is_oom, words, self._ended_by_us)


class ContainerJob(JobBlock[Outcome]):
    """Runs a stage in a container of its own, or follows the one that already does."""

    _block_type_name = "Container Job"
    _block_type_slug = "container-job"
    _description = "Runs a stage's own command in a container of a Docker engine."

    spec: LaunchSpec
    options: ContainerOptions = ContainerOptions()
    poll_seconds: float = 5.0
    """Between two looks at a container that writes; when its output ends one comes at once."""
    hang_seconds: float | None = None
    """Without a line in the log for so long a running container counts as hung."""

    async def trigger(self) -> ContainerJobRun:
        """Find the container of this key, or make and start it. Being cancelled meanwhile ends
        it."""
        return await when_found(self.spec, asyncio.to_thread(self._find_or_start))

    def _find_or_start(self) -> ContainerJobRun:
        folder, name = Path(self.spec.run_directory), container_name(self.spec)
        host = Host(user=f"{os.getuid()}:{os.getgid()}", environment=os.environ)
        request = render_container(self.spec, self.options, host)
        noted = read_note(folder / NOTE, name)
        if (end := end_noted(noted)) is not None:
            self.logger.info("%s has ended in container %s already", self.spec.name, name)
            return ContainerJobRun(self, None, end)
        client = ContainerClient(self.options.engine)
        try:
            look = client.look(name)
            if look is not None or noted is None:  # else it ran, and somebody removed it
                look = self._started(client, request, look)
                note_container(folder, name, None)
            return ContainerJobRun(self, client, look)
        except TrainyardError:
            client.close()
            raise

    def _started(
        self, client: ContainerClient, request: ContainerRequest, look: ContainerState | None
    ) -> ContainerState | None:
        """The container, made when there is none, started when nobody has."""
        folder, name = Path(self.spec.run_directory), request.name
        if look is None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SCRIPT).write_text(docker_run(request))
            client.make(request, os.environ, self.options.pull == "missing")
            note(folder, "submitted", job=name)
            self.logger.info("%s runs in container %s", self.spec.name, name)
        elif look.key != self.spec.key:
            raise ConfigError(
                f"container {name} is there and none of trainyard's (its label says "
                f"{look.key!r}); remove or rename it"
            )
        else:
            note(folder, "reattached", job=name)
            self.logger.info("%s is container %s already: following it", self.spec.name, name)
        look = client.wait_for(name) if look is None else look
        if look is not None and look.state == NOT_STARTED:
            look = self._start(client, name)
        if look is not None:
            note(folder, "started", at=look.began, job=name)
        return look

    def _start(self, client: ContainerClient, name: str) -> ContainerState | None:
        try:
            client.start(name)
        except TrainyardError:
            client.remove(name)  # of what cannot be started nothing shall be found
            raise
        return client.look(name)
