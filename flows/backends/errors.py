"""Backends that do not answer: a Docker engine, a Slurm controller, an API server, a registry."""

from __future__ import annotations

import re

from trainyard.errors import InfrastructureError


class BackendUnavailableError(InfrastructureError):
    """A backend did not answer while we retried. Its jobs may still run; their state is unknown."""


class NoRoomError(InfrastructureError):
    """A submission was refused until other jobs end; nothing was created."""


REGISTRY_UNAVAILABLE = re.compile(
    r"time-?out|deadline exceeded|connection (refused|reset)|no such host|EOF\b|"
    r"temporar|TLS handshake|toomanyrequests|too many requests|\b50[0234]\b",
    re.IGNORECASE,
)


def is_registry_unavailable(message: str) -> bool:
    """Whether a pull failed because the registry cannot be reached; any other reason is a fault of
    the request."""
    return REGISTRY_UNAVAILABLE.search(message) is not None
