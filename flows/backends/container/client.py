"""The Docker engine as the container block needs it: find, make, start, look, end, remove.

Each refusal of the engine comes back as the error that it is: what a person has to correct, or an
engine that does not answer, which may answer later."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from requests.exceptions import RequestException

from flows.backends.container.refusals import away, half_pulled, no_image, refused, said, unseen
from flows.backends.container.render import (
    JOB_LABEL,
    KEY_LABEL,
    RUN_VARIABLE,
    ContainerRequest,
    name_of,
)

SOCKET = "unix:///var/run/docker.sock"
TIMEOUT_SECONDS = 60

MADE_SECONDS = 10.0

NOT_STARTED = "created"
ENDED = ("exited", "dead")


@dataclass(frozen=True, slots=True)
class ContainerState:
    """What the engine says of a container."""

    id: str
    key: str
    state: str
    """created, running, paused, restarting, removing, exited, dead."""
    exit_code: int
    was_out_of_memory: bool
    error: str
    began: float
    """Seconds since 1970; long before that when it never did."""
    ended: float

    @property
    def has_ended(self) -> bool:
        """True when nothing of it runs any more."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class Ours:
    """A container of the block, whoever made it and whatever became of it."""

    name: str
    folder: str
    """Run folder of its job; empty when nothing tells."""
    made: float
    """Seconds since 1970."""
    size_bytes: int
    """What it wrote besides its image and its mounts."""
    look: ContainerState


class ContainerClient:
    """One engine. Its methods may be called from any thread."""

    def __init__(self, engine: str | None) -> None:
        self.address = engine or os.environ.get("DOCKER_HOST") or SOCKET
        with self._told():
            # TLS and its certificates come from the environment, as for the program `docker`.
            environment = {**os.environ, "DOCKER_HOST": self.address}
            self._api = docker.DockerClient.from_env(
                environment=environment, timeout=TIMEOUT_SECONDS, version="auto"
            ).api

    def close(self) -> None:
        """Let the connections go."""
        self._api.close()

    def look(self, name: str) -> ContainerState | None:
        """A container by its name or id; None when there is none."""
        found = self._inspected(name)
        return None if found is None else _look(found)

    def ours(self) -> Iterator[Ours]:
        """Every container that bears our label and a name that the block gives."""
        try:
            with self._told():
                listed = self._api.containers(all=True, size=True, filters={"label": KEY_LABEL})
        except APIError as error:
            raise unseen(self.address, error) from error
        for one in listed:
            found = self._inspected(one["Id"])
            labels = one["Labels"]
            name = name_of(labels.get(JOB_LABEL, ""), labels[KEY_LABEL])
            if found is not None and found["Name"] == f"/{name}":
                variables = dict(part.partition("=")[::2] for part in found["Config"]["Env"] or ())
                folder = variables.get(RUN_VARIABLE, "")
                yield Ours(name, folder, one["Created"], one.get("SizeRw", 0), _look(found))

    def _inspected(self, name: str) -> dict[str, Any] | None:
        try:
            with self._told():
                found: dict[str, Any] = self._api.inspect_container(name)
        except NotFound:
            return None
        except APIError as error:
            raise unseen(self.address, error) from error
        return found

    def wait_for(self, name: str) -> ContainerState | None:
        """A container that is being made: its name is taken before it can be seen."""
        deadline = time.monotonic() + MADE_SECONDS
        while (look := self.look(name)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return look

    def make(self, request: ContainerRequest, values: Mapping[str, str], may_pull: bool) -> None:
        """Make a container that does not run yet; nothing when there is one of that name."""
        variables = [f"{name}={values[name]}" for name in request.inherited]
        body = {**request.body, "Env": [*variables, *request.body["Env"]]}
        if (lack := self._create(body, request.name)) is not None:
            self._pull(body["Image"], may_pull, lack)
            lack = self._create(body, request.name)
        if lack is not None:  # removed again, or for other machines than this one
            raise no_image(body["Image"], self.address, f"{lack} (it was pulled just now)")

    def _create(self, body: dict[str, Any], name: str) -> str | None:
        """Make it, unless another flow was quicker; what the engine says where it lacks the
        image."""
        try:
            with self._told():
                self._api.create_container_from_config(body, name)  # type: ignore[no-untyped-call]
        except APIError as error:
            if isinstance(error, NotFound) and _is_of_image(error):
                return said(error)
            if error.status_code != 409:
                raise refused(self.address, error) from error
        return None

    def _pull(self, image: str, may_pull: bool, lack: str) -> None:
        if not may_pull:
            raise no_image(image, self.address, lack)
        repository, tag = _parts(image)
        try:
            with self._told():
                # What fails once the download has begun is told in the stream alone.
                for line in self._api.pull(repository, tag, stream=True, decode=True):
                    if "error" in line:
                        raise half_pulled(image, self.address, str(line["error"]).strip())
        except APIError as error:
            raise no_image(image, self.address, said(error)) from error

    def start(self, name: str) -> None:
        """Start a container that was made; ConfigError when its program cannot be."""
        try:
            with self._told():
                self._api.start(name)
        except APIError as error:
            raise refused(self.address, error) from error

    def signal(self, name: str, signal: str) -> None:
        """Send a signal to its first process; nothing when it does not run."""
        try:
            with self._told():
                self._api.kill(name, signal)
        except APIError as error:
            if error.status_code not in (404, 409):
                raise refused(self.address, error) from error

    def remove(self, name: str) -> None:
        """Remove it, however it is; nothing when it is gone."""
        try:
            with self._told():
                self._api.remove_container(name, v=True, force=True)
        except APIError as error:
            if error.status_code not in (404, 409):  # 409: somebody is removing it
                raise refused(self.address, error) from error

    def output(self, name: str) -> Iterator[bytes]:
        """What it writes to stdout and stderr, from its beginning, until it ends."""
        try:
            with self._told():
                yield from self._api.logs(name, stream=True, follow=True)
        except APIError as error:
            raise unseen(self.address, error) from error

    @contextmanager
    def _told(self) -> Iterator[None]:
        """An engine that is not there, in words; what it refuses goes through."""
        try:
            yield
        except APIError:
            raise
        except (DockerException, RequestException, OSError) as error:
            raise away(self.address, error) from error


def _look(found: Mapping[str, Any]) -> ContainerState:
    state = found["State"]
    return ContainerState(
        id=found["Id"],
        key=(found["Config"]["Labels"] or {}).get(KEY_LABEL, ""),
        state=state["Status"],
        exit_code=state["ExitCode"],
        was_out_of_memory=state["OOMKilled"],
        error=state["Error"],
        began=_seconds(state["StartedAt"]),
        ended=_seconds(state["FinishedAt"]),
    )


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def _is_of_image(error: NotFound) -> bool:
    return isinstance(error, ImageNotFound) or "no such image" in said(error).lower()


def _parts(image: str) -> tuple[str, str | None]:
    """Repository and tag, as the engine's API wants them; a digest stays where it is."""
    if "@" in image:
        return image, None
    repository, colon, tag = image.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (image, "latest")
