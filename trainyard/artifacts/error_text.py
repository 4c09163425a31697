"""Words for what stores refuse."""

from __future__ import annotations

import errno

from trainyard.artifacts.links import TOO_LONG, why_absent
from trainyard.artifacts.urls import is_local, is_web
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError, TrainyardError

CREDENTIALS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL in the environment"


def rights(url: str) -> str:
    """What to check when access to a URL is refused."""
    if is_web(url):
        return "that everyone may read it, as no password is ever sent, or download it"
    return "the permissions of the path" if is_local(url) else CREDENTIALS


def system_fault(url: str, name: str, error: OSError) -> TrainyardError:
    """What the system raised during an operation, in our words."""
    writes = name in ("open", "create", "replace", "move")
    no_folder = isinstance(error, FileExistsError | NotADirectoryError)
    if no_folder and writes:
        return ConfigError(f"{url}: a file stands where a folder is needed; choose another place")
    if "bucket does not exist" in str(error):
        return ConfigError(f"{url}: the bucket does not exist; create it first")
    if error.errno == errno.ENAMETOOLONG and writes:
        return ConfigError(f"{url}: {TOO_LONG}")
    nowhere = (errno.ELOOP, errno.ENAMETOOLONG)
    if no_folder or isinstance(error, FileNotFoundError) or error.errno in nowhere:
        return ArtifactError(f"{url}: {why_absent(url)}")
    if isinstance(error, IsADirectoryError):
        return ArtifactError(f"{url}: this is a folder, not a file")
    if isinstance(error, PermissionError):
        return ConfigError(f"{url}: access refused ({error}); check {rights(url)}")
    return InfrastructureError(f"{url}: {name} failed: {error}")


def store_fault(url: str, name: str, error: Exception) -> TrainyardError:
    """What a library of object stores raised during an operation, in our words."""
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return ConfigError(
            f"{url}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            f"(and AWS_ENDPOINT_URL for a store other than AWS) in the environment"
        )
    return InfrastructureError(f"{url}: {name} failed: {type(error).__name__}: {error}")
