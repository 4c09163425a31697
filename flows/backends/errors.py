"""Backends that do not answer: a Docker engine, a Slurm controller, an API server, a registry."""

from __future__ import annotations

import re

from trainyard.errors import InfrastructureError


class BackendUnavailableError(InfrastructureError):
    """A backend did not answer for as long as we retry. Its jobs may still run, so this does not
    tell how they are."""


class NoRoomError(InfrastructureError):
    """A submission was refused until other jobs end; nothing was created."""


REGISTRY_UNAVAILABLE = re.compile(
    r"time-?out|deadline exceeded|connection (refused|reset)|no such host|EOF\b|"
    r"temporar|TLS handshake|toomanyrequests|too many requests|\b50[0234]\b",
    re.IGNORECASE,
)


def is_registry_unavailable(message: str) -> bool:
    """True if an image was not pulled because its registry cannot be reached. Any other reason is
    about what was asked for."""
    return REGISTRY_UNAVAILABLE.search(message) is not None
