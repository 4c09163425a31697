"""Words for what stores refuse."""

from __future__ import annotations

from trainyard.artifacts.urls import is_local, is_web
from trainyard.errors import ConfigError, InfrastructureError, TrainyardError

CREDENTIALS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL in the environment"


def rights(url: str) -> str:
    """What to check when access to a URL is refused."""
    if is_web(url):
        return "that everyone may read it, as no password is ever sent, or download it"
    return "the permissions of the path" if is_local(url) else CREDENTIALS


def store_fault(url: str, name: str, error: Exception) -> TrainyardError:
    """What a library of object stores raised during an operation, in our words."""
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return ConfigError(
            f"{url}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            f"(and AWS_ENDPOINT_URL for a store other than AWS) in the environment"
        )
    return InfrastructureError(f"{url}: {name} failed: {type(error).__name__}: {error}")
