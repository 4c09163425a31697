"""A stage as a container of a Docker engine: made once, found again, followed to its end.

The container outlives whoever started it. Its name holds the key of the submission, and an engine
has each name once, so a flow that was killed and started again follows the container that is there.
When its end is known that is noted in the run folder, and the container removed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from prefect.blocks.abstract import JobBlock

from flows.backends.base import when_found
from flows.backends.container.client import NOT_STARTED, ContainerClient, Look
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
from flows.backends.container.run import ContainerJobRun
from flows.backends.events import note
from flows.backends.notes import read_note
from flows.backends.outcome import Outcome
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError, TrainyardError


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
        self, client: ContainerClient, request: ContainerRequest, look: Look | None
    ) -> Look | None:
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

    def _start(self, client: ContainerClient, name: str) -> Look | None:
        try:
            client.start(name)
        except TrainyardError:
            client.remove(name)  # of what cannot be started nothing shall be found
            raise
        return client.look(name)
