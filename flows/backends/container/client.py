"""A Docker engine, as the container backend uses it: find, create, start, read, signal, remove.

A refusal of the engine becomes a ConfigError that says what to correct, or an InfrastructureError
if a retry may succeed."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from requests.exceptions import RequestException

from flows.backends.container.render import (
    JOB_LABEL,
    KEY_LABEL,
    RUN_VARIABLE,
    ContainerRequest,
    name_of,
)
from flows.backends.errors import BackendUnavailableError, is_registry_unavailable
from flows.backends.run_folder import write_record
from trainyard.errors import ConfigError, InfrastructureError

SOCKET = "unix:///var/run/docker.sock"
TIMEOUT_SECONDS = 60
CREATE_SECONDS = 10.0
"""How long a container may be invisible after its name is in use."""

RECORD = "container.json"
"""File of a run folder: the name of its container and, once that has ended, how."""

NOT_STARTED = "created"
ENDED = ("exited", "dead")

CORRECT = (
    (r"could not select device driver", "install the NVIDIA container toolkit for this engine"),
    (r"nvidia-container-cli|unknown device", "look at the container option gpus"),
    (r"bind source path does not exist", "make that folder on the machine of the engine"),
    (r"network \S+ not found", "correct the container option network"),
    (r"adding device|error gathering device", "correct the container option devices"),
    (
        r"executable file not found|exec: .{0,500}no such file or directory",
        "the image has no such program",
    ),
    (r"permission denied", "the image's program may not be run by that user"),
    (r"unable to find user|no matching entries", "correct the container option user"),
    (r"chdir to cwd|Cwd must be an absolute path", "the working directory is not in the image"),
    (r"minimum memory limit|NCPU|Range of CPUs|nano", "correct the job's cpus or memory"),
    (r"shm size|invalid mount|invalid tmpfs", "correct the container options"),
)
"""Refusals of impossible requests, and what to correct."""

FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ContainerState:
    """A container as the engine reports it. Also the `end` in container.json: keep its fields."""

    id: str
    key: str
    state: str
    """created, running, paused, restarting, removing, exited, dead."""
    exit_code: int
    was_out_of_memory: bool
    error: str
    began: float
    """Seconds since 1970; long before that if it never did."""
    ended: float

    @property
    def has_ended(self) -> bool:
        """Whether no process of it runs any more."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class OwnContainer:
    """A container that the container backend created, in any state."""

    name: str
    folder: str
    """Run folder of its job; empty if unknown."""
    made: float
    """Seconds since 1970."""
    size_bytes: int
    """Written besides its image and its mounts."""
    state: ContainerState


def recorded_end(record: dict[str, Any] | None) -> ContainerState | None:
    """How the recorded container ended; None if that was not recorded."""
    end = None if record is None else record["end"]
    return None if end is None else ContainerState(**end)


def record_container(folder: Path, name: str, end: ContainerState | None) -> None:
    """Record that a container of this name was started, or how it ended."""
    fields = None if end is None else dataclasses.asdict(end)
    write_record(folder / RECORD, {"name": name, "end": fields})


class ContainerClient:
    """One engine. Its methods may be called from any thread."""

    def __init__(self, engine: str | None) -> None:
        self.address = engine or os.environ.get("DOCKER_HOST") or SOCKET
        with self._reachable():
            # TLS and its certificates come from the environment, as for the program `docker`.
            environment = {**os.environ, "DOCKER_HOST": self.address}
            self._api = docker.DockerClient.from_env(
                environment=environment, timeout=TIMEOUT_SECONDS, version="auto"
            ).api

    def close(self) -> None:
        """Close the connections."""
        self._api.close()

    def look(self, name: str) -> ContainerState | None:
        """A container by its name or id; None if there is none."""
        found = self._inspect(name)
        return None if found is None else _state(found)

    def own(self) -> Iterator[OwnContainer]:
        """Every container with our label and a name that this backend gives."""
        try:
            with self._reachable():
                listed = self._api.containers(all=True, size=True, filters={"label": KEY_LABEL})
        except APIError as error:
            raise self._unreadable(error) from error
        for one in listed:
            found = self._inspect(one["Id"])
            labels = one["Labels"]
            name = name_of(labels.get(JOB_LABEL, ""), labels[KEY_LABEL])
            if found is not None and found["Name"] == f"/{name}":
                variables = dict(part.partition("=")[::2] for part in found["Config"]["Env"] or ())
                folder = variables.get(RUN_VARIABLE, "")
                size = one.get("SizeRw", 0)
                yield OwnContainer(name, folder, one["Created"], size, _state(found))

    def _inspect(self, name: str) -> dict[str, Any] | None:
        try:
            with self._reachable():
                found: dict[str, Any] = self._api.inspect_container(name)
        except NotFound:
            return None
        except APIError as error:
            raise self._unreadable(error) from error
        return found

    def wait_for(self, name: str) -> ContainerState | None:
        """A container that is being created: its name is in use before it can be seen."""
        deadline = time.monotonic() + CREATE_SECONDS
        while (state := self.look(name)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return state

    def create(self, request: ContainerRequest, values: Mapping[str, str], may_pull: bool) -> None:
        """Create a container that does not run yet, unless there is one of that name."""
        variables = [f"{name}={values[name]}" for name in request.inherited]
        body = {**request.body, "Env": [*variables, *request.body["Env"]]}
        if (missing := self._try_create(body, request.name)) is not None:
            self._pull(body["Image"], may_pull, missing)
            missing = self._try_create(body, request.name)
        if missing is not None:  # removed again, or for other machines than this one
            raise self._no_image(body["Image"], f"{missing} (it was pulled just now)")

    def _try_create(self, body: dict[str, Any], name: str) -> str | None:
        """Create it, unless another flow was quicker; the engine's message if it lacks the
        image."""
        try:
            with self._reachable():
                self._api.create_container_from_config(body, name)  # type: ignore[no-untyped-call]
        except APIError as error:
            message = _message(error)
            if isinstance(error, ImageNotFound) or "no such image" in message.lower():
                return message
            if error.status_code != 409:
                raise self._refused(error) from error
        return None

    def _pull(self, image: str, may_pull: bool, missing: str) -> None:
        if not may_pull:
            raise self._no_image(image, missing)
        repository, tag = _parts(image)
        try:
            with self._reachable():
                # A failure after the download has begun is reported in the stream only.
                for line in self._api.pull(repository, tag, stream=True, decode=True):
                    if "error" in line:
                        raise self._half_pulled(image, str(line["error"]).strip())
        except APIError as error:
            raise self._no_image(image, _message(error)) from error

    def start(self, name: str) -> None:
        """Start a created container; ConfigError if its program cannot be started."""
        try:
            with self._reachable():
                self._api.start(name)
        except APIError as error:
            raise self._refused(error) from error

    def signal(self, name: str, signal: str) -> None:
        """Send a signal to its first process, if it runs."""
        try:
            with self._reachable():
                self._api.kill(name, signal)
        except APIError as error:
            if error.status_code not in (404, 409):
                raise self._refused(error) from error

    def remove(self, name: str) -> None:
        """Remove a container in any state, if it exists."""
        try:
            with self._reachable():
                self._api.remove_container(name, v=True, force=True)
        except APIError as error:
            if error.status_code not in (404, 409):  # 409: it is being removed
                raise self._refused(error) from error

    def output(self, name: str) -> Iterator[bytes]:
        """Its stdout and stderr, from the beginning, until it ends."""
        try:
            with self._reachable():
                yield from self._api.logs(name, stream=True, follow=True)
        except APIError as error:
            raise self._unreadable(error) from error

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Raise an error for an engine that cannot be reached; let its refusals pass."""
        try:
            yield
        except APIError:
            raise
        except (DockerException, RequestException, OSError) as error:
            if "PermissionError" in repr(error) or "Permission denied" in str(error):
                raise ConfigError(
                    f"the Docker engine at {self.address} refuses this user; join the "
                    f"group docker, or name another engine in DOCKER_HOST"
                ) from error
            raise BackendUnavailableError(
                f"the Docker engine at {self.address} does not answer ({error}); start it, or name "
                f"another one in DOCKER_HOST or in the container option engine"
            ) from error

    # --- refusals -----------------------------------------------------------------------------

    def _refused(self, error: APIError) -> ConfigError | InfrastructureError:
        """The error for a refusal to create, start, signal or remove."""
        message = _message(error)
        if FULL.search(message):
            return self._disk_full(message)
        for pattern, advice in CORRECT:
            if re.search(pattern, message, re.IGNORECASE):
                return ConfigError(f"the Docker engine refuses: {message}; {advice}")
        if error.is_client_error():
            return ConfigError(
                f"the Docker engine refuses: {message}; correct the container options"
            )
        return InfrastructureError(f"the Docker engine at {self.address} failed: {message}")

    def _unreadable(self, error: APIError) -> ConfigError | InfrastructureError:
        """The error for a failed report on a container, whose state stays unknown."""
        if error.is_server_error():
            return BackendUnavailableError(
                f"the Docker engine at {self.address} cannot report: {_message(error)}"
            )
        return self._refused(error)

    def _no_image(self, image: str, message: str) -> ConfigError | InfrastructureError:
        """The error for an image that is missing and cannot be pulled."""
        if FULL.search(message):
            return self._disk_full(message)
        return ConfigError(
            f"image {image} is not on the Docker engine at {self.address}, and cannot be pulled: "
            f"{message}; build it (make images), or correct the name in the yard"
        )

    def _half_pulled(self, image: str, message: str) -> ConfigError | InfrastructureError:
        """The error for a pull that failed during its download, so the image exists."""
        if FULL.search(message):
            return self._disk_full(message)
        text = f"pulling image {image} to the Docker engine at {self.address} failed: {message}"
        if is_registry_unavailable(message):
            return InfrastructureError(f"{text}; its registry became unavailable")
        return ConfigError(f"{text}; pull it there by hand (docker pull {image})")

    def _disk_full(self, message: str) -> InfrastructureError:
        return InfrastructureError(
            f"the disk of the Docker engine at {self.address} is full: {message}; make room there "
            f"(docker system df, docker image prune)"
        )


def _message(error: APIError) -> str:
    """The engine's own message."""
    return str(error.explanation or error).strip()


def _state(found: Mapping[str, Any]) -> ContainerState:
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


def _parts(image: str) -> tuple[str, str | None]:
    """Repository and tag for the engine's API; a digest stays part of the repository."""
    if "@" in image:
        return image, None
    repository, colon, tag = image.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (image, "latest")
