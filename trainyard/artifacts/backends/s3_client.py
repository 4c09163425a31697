"""Direct calls of an S3 store, from any number of threads at once.

Why not s3fs: all bytes pass its one event loop, at twice the processor time, and its import takes
half a second. Stores also answer a lost race with different texts; only the HTTP status is common
to all."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

from trainyard.artifacts import retry
from trainyard.artifacts.error_text import BUCKET, bad_bucket
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError

CONFIG = {
    # An unreachable store is an error within one or two minutes, not five.
    "connect_timeout": 5,
    "read_timeout": 20,
    "retries": {"mode": "standard", "max_attempts": 2},
}
CONNECTIONS = 32

LOST_RACE = (412, 409)
"""Precondition failed; and AWS's conflict while another conditional write is in flight."""

NOT_IMPLEMENTED = 501
"""A retry does not help."""


@lru_cache(maxsize=8)
def _client(process: int, endpoint: str) -> Any:
    """One per process: connections do not survive a fork."""
    try:
        from botocore.config import Config
        from botocore.session import Session
    except ImportError as error:
        raise ConfigError(
            f"s3:// needs a package that is not installed: {error}; run "
            "`pip install '.[s3]'` in the checkout"
        ) from error
    # Without TLS every body is signed, so a checksum adds nothing.
    checksums = {"request_checksum_calculation": "when_required"}
    more = checksums if endpoint.startswith("http:") else {}
    config = Config(max_pool_connections=CONNECTIONS, **CONFIG, **more)
    return Session().create_client("s3", config=config)


def call(method: str, **arguments: Any) -> Any:
    """One call of the client; the whole body is in "Data". None for a lost race,
    FileNotFoundError for a missing key."""
    client = _own_client()
    from botocore.exceptions import (
        ClientError,
        ConnectionError,
        HTTPClientError,
        IncompleteReadError,
    )

    address = str(client.meta.endpoint_url)
    tries = retry.Retry(address)
    while True:
        try:
            reply = getattr(client, method)(**arguments)
            if "Body" in reply:
                with reply["Body"] as body:
                    reply["Data"] = body.read()
            retry.answered(address)
            return reply
        except ClientError as error:
            status = int(error.response["ResponseMetadata"].get("HTTPStatusCode", 0))
            is_unavailable = status >= 500 and status != NOT_IMPLEMENTED
            if not is_unavailable:
                retry.answered(address)
            if not ((is_unavailable or status == 409) and tries.again(error, is_unavailable)):
                return _refusal(method, arguments, status, error)
        except (ConnectionError, HTTPClientError, IncompleteReadError) as error:
            if not tries.again(error):
                raise InfrastructureError(f"the store cannot be reached: {error}") from error


def endpoint() -> str:
    """The URL of the store, from the environment and AWS's configuration files."""
    return str(_own_client().meta.endpoint_url)


def _own_client() -> Any:
    given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    return _client(os.getpid(), given)


def _refusal(method: str, arguments: dict[str, Any], status: int, error: Exception) -> None:
    """None for a lost race; raises for anything else."""
    is_conditional = "IfMatch" in arguments or "IfNoneMatch" in arguments
    if is_conditional and (status in LOST_RACE or (status == 404 and "IfMatch" in arguments)):
        return
    if status == 404:
        missing = FileNotFoundError(str(error))
        refuse_missing_bucket(missing, f"s3://{arguments['Bucket']}")
        raise missing from error
    bucket = str(arguments["Bucket"])
    # The answer to HEAD has no code, only the status.
    if "InvalidBucketName" in str(error) or (status == 400 and not BUCKET.fullmatch(bucket)):
        raise bad_bucket(bucket) from error
    if status == 416:
        raise ArtifactError(f"{arguments['Key']}: shorter than it was") from error
    if status == 403:
        raise PermissionError(str(error)) from error
    raise InfrastructureError(f"the store refused {method}: {error}") from error


def refuse_missing_bucket(error: FileNotFoundError, where: str) -> None:
    """Raise ConfigError for a missing bucket, which is not the same as an empty one."""
    if "bucket does not exist" in str(error) or "NoSuchBucket" in str(error):
        raise ConfigError(
            f"{where}: the bucket does not exist at this endpoint; create it, or check the URL "
            "and AWS_ENDPOINT_URL"
        ) from error
