"""What a Docker engine says when it refuses or fails, as errors for people: what they have to
correct, or what may go well later."""

from __future__ import annotations

import re

from docker.errors import APIError

from flows.backends.errors import BackendUnavailableError
from flows.backends.registry import is_away
from trainyard.errors import ConfigError, InfrastructureError

CORRECT = (
    (r"could not select device driver", "install the NVIDIA container toolkit for this engine"),
    (r"nvidia-container-cli|unknown device", "look at the container option gpus"),
    (r"bind source path does not exist", "make that folder on the machine of the engine"),
    (r"network \S+ not found", "correct the container option network"),
    (r"adding device|error gathering device", "correct the container option devices"),
    (r"executable file not found|no such file or directory", "the image has no such program"),
    (r"permission denied", "the image's program may not be run by that user"),
    (r"unable to find user|no matching entries", "correct the container option user"),
    (r"chdir to cwd|Cwd must be an absolute path", "the working directory is not in the image"),
    (r"minimum memory limit|NCPU|Range of CPUs|nano", "correct the job's cpus or memory"),
    (r"shm size|invalid mount|invalid tmpfs", "correct the container options"),
)
"""What an engine says when it was asked for what cannot be, and what to do about it."""

FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)


def said(error: APIError) -> str:
    """The engine's own words."""
    return str(error.explanation or error).strip()


def refused(address: str, error: APIError) -> ConfigError | InfrastructureError:
    """What it would not make, start, signal or remove."""
    words = said(error)
    if FULL.search(words):
        return _full(address, words)
    for pattern, advice in CORRECT:
        if re.search(pattern, words, re.IGNORECASE):
            return ConfigError(f"the Docker engine refuses: {words}; {advice}")
    if error.is_client_error():
        return ConfigError(f"the Docker engine refuses: {words}; correct the container options")
    return InfrastructureError(f"the Docker engine at {address} failed: {words}")


def unseen(address: str, error: APIError) -> ConfigError | InfrastructureError:
    """What it would not tell of a container, which says nothing of that container."""
    if error.is_server_error():
        return BackendUnavailableError(f"the Docker engine at {address} cannot tell: {said(error)}")
    return refused(address, error)


def away(address: str, error: Exception) -> ConfigError | BackendUnavailableError:
    """An engine that does not answer."""
    if "PermissionError" in repr(error) or "Permission denied" in str(error):
        return ConfigError(
            f"the Docker engine at {address} may not be used by this user; join the group docker, "
            f"or name another engine in DOCKER_HOST"
        )
    return BackendUnavailableError(
        f"the Docker engine at {address} does not answer ({error}); start it, or name another one "
        f"in DOCKER_HOST or in the container option engine"
    )


def no_image(image: str, address: str, words: str) -> ConfigError | InfrastructureError:
    """An image that is not there, and of which nothing comes; words: why."""
    if FULL.search(words):
        return _full(address, words)
    return ConfigError(
        f"image {image} is not on the Docker engine at {address}, and cannot be pulled: {words}; "
        f"build it (make images), or correct the name in the yard"
    )


def half_pulled(image: str, address: str, words: str) -> ConfigError | InfrastructureError:
    """An image whose download had begun, so it is there; words: what ended that."""
    if FULL.search(words):
        return _full(address, words)
    told = f"pulling image {image} to the Docker engine at {address} ended with: {words}"
    if is_away(words):
        return InfrastructureError(f"{told}; its registry was lost on the way")
    return ConfigError(f"{told}; pull it there by hand (docker pull {image})")


def _full(address: str, words: str) -> InfrastructureError:
    return InfrastructureError(
        f"the disk of the Docker engine at {address} is full: {words}; make room there "
        f"(docker system df, docker image prune)"
    )
