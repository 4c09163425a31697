"""Checks of a Docker engine and of the images of stages on it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from requests.exceptions import ConnectionError as RequestsConnectionError
from requests.exceptions import ReadTimeout, RequestException

from flows.backends.container.client import SOCKET
from flows.backends.container.options import ContainerOptions
from flows.doctor.check import CheckResult, fail, ok, warn
from flows.doctor.context import YardContext
from flows.stage_configs import CONFIGS
from trainyard.errors import ConfigError, InfrastructureError
from trainyard.version import VERSION

SECONDS = 8
SMOKE_SECONDS = 60
AT_ONCE = 4
"""Images that are tried at once."""
BUSY_SECONDS = 30
"""Limit of a request to an engine that starts several containers."""
IMAGES_SECONDS = BUSY_SECONDS + ceil(len(CONFIGS) / AT_ONCE) * (SMOKE_SECONDS + BUSY_SECONDS)
"""Enough for a yard in which every stage has its own image, on a busy machine."""

VERSION_LABEL = "org.opencontainers.image.version"


def engine_jobs(yard: YardContext) -> CheckResult:
    """The engine answers, and has GPUs if stages request them."""
    report = _ask(yard, lambda client: {"version": client.version(), "info": client.info()})
    version, info = report["version"], report["info"]
    message = f"Docker engine {version['Version']} at {_address(yard)}, storage {info['Driver']}"
    cdi = info.get("DiscoveredDevices") or []  # of engines that know CDI
    runtimes = {*info.get("Runtimes", {}), *(device.get("Source", "") for device in cdi)}
    if yard.num_gpus and not any("nvidia" in name for name in runtimes):
        return fail(
            ConfigError,
            f"{message}; stages request GPUs, which this engine cannot provide",
            "install the NVIDIA container toolkit: nvidia-ctk runtime configure --runtime=docker",
        )
    return ok(message)


def engine_image(yard: YardContext) -> CheckResult:
    """Every image of a stage is on the engine and of our version, and the stage starts in it."""
    stages: dict[str, str] = {}
    for stage in CONFIGS:
        name = yard.site.image_of(stage)
        if name is not None:
            stages.setdefault(name, stage)
    if not stages:
        todo = (
            'image = "trainyard/{stage}:{version}" in the yard\'s profile; make images builds them'
        )
        return fail(ConfigError, "the profile names no image", todo)
    labels = _ask(yard, lambda client: {name: _labels(client, name) for name in stages})
    missing = [name for name, found in labels.items() if found is None]
    if missing:
        return _missing(yard, missing)
    for name, found in labels.items():
        version = found.get(VERSION_LABEL, VERSION)
        if version != VERSION:
            message = f"image {name} is of version {version}, the flows are of {VERSION}"
            return fail(ConfigError, message, "make images, or name the image of this version")
    for name, stage, fault in _smokes(yard, stages):
        if fault:
            message = f"image {name}: stage {stage} does not start in it: {fault}"
            return fail(ConfigError, message, f"docker run --rm {name} --help; make images")
    return ok(f"{len(stages)} images of version {VERSION}, each starts its stage")


def _smokes(yard: YardContext, stages: dict[str, str]) -> Iterable[tuple[str, str, str]]:
    """Image, stage, and why the stage does not start in it; empty if it does."""
    python = yard.site.python

    def smoke(name: str, stage: str) -> tuple[str, str, str]:
        options = yard.site.options_of(stage)
        fault = _ask(
            yard, lambda client: _smoke(client, name, stage, python, options), BUSY_SECONDS
        )
        return name, stage, str(fault)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(smoke, stages.keys(), stages.values()))


def _missing(yard: YardContext, names: list[str]) -> CheckResult:
    message = f"not on the engine at {_address(yard)}: {', '.join(names)}"
    todo = "make images, or docker pull; image in the yard's profile names them"
    if yard.site.container.pull == "missing":
        return warn(f"{message}; the first job has to pull it", todo)
    return fail(ConfigError, message, todo)


def _labels(client: docker.DockerClient, name: str) -> dict[str, str] | None:
    try:
        return dict(client.images.get(name).labels or {})
    except (ImageNotFound, NotFound):
        return None


def _smoke(
    client: docker.DockerClient, name: str, stage: str, python: str, options: ContainerOptions
) -> str:
    """Run a stage's --help like its jobs, without a network; why it fails, empty if it works."""
    container = client.containers.create(
        name,
        command=["-m", f"stages.{stage}", "--help"],
        entrypoint=[python],
        network_mode="none",
        read_only=options.read_only,
        tmpfs={"/tmp": "size=64m"},
        cap_drop=["ALL"],
        init=options.init,
    )
    try:
        container.start()
        status = _end_of(container, f"image {name}: stage {stage}")
        lines = container.logs(tail=5).decode(errors="replace").strip().splitlines()
    except APIError as error:
        return str(error.explanation or error)
    finally:
        container.remove(force=True)
    return "" if status == 0 else f"status {status}: {lines[-1] if lines else 'no output'}"


def _end_of(container: Any, what: str) -> int:
    """The exit status."""
    try:
        return int(container.wait(timeout=SMOKE_SECONDS)["StatusCode"])
    except (ReadTimeout, RequestsConnectionError) as error:
        # The second is what requests makes of a time-out after the engine has begun to answer.
        raise InfrastructureError(
            f"{what} did not start within {SMOKE_SECONDS} s; is the machine of the engine too "
            "busy? Try again when it is less busy"
        ) from error


def _address(yard: YardContext) -> str:
    return yard.site.container.engine or os.environ.get("DOCKER_HOST") or SOCKET


def _ask(yard: YardContext, question: Any, seconds: int = SECONDS) -> Any:
    """Ask the engine; ConfigError or InfrastructureError if it cannot be reached."""
    address = _address(yard)
    try:
        environment = {**os.environ, "DOCKER_HOST": address}
        client = docker.DockerClient.from_env(environment=environment, timeout=seconds)
        try:
            return question(client)
        finally:
            client.close()
    except (DockerException, RequestException, OSError) as error:
        if "Permission denied" in str(error) or "PermissionError" in repr(error):
            raise ConfigError(
                f"this user may not use the Docker engine at {address}; join the group "
                "docker, or name another engine in DOCKER_HOST"
            ) from error
        raise InfrastructureError(
            f"the Docker engine at {address} does not answer ({error}); start it, or name another "
            "one in DOCKER_HOST or in the container option engine"
        ) from error
