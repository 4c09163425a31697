"""Errors that a client gets: status, message, and a kind to act on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from trainyard.errors import TrainyardError
from trainyard.inference.request import BrokenOutputError
from trainyard.logging import shortened
from trainyard.serving.service import EngineFailedError, QueueFullError

FLAG = re.compile(r"--([a-z][a-z0-9-]+)")
MEGATRON = "/api"
"""Path of Megatron-LM's interface."""
RETRY_SECONDS = 1
"""After which a client may try again when the queue is full."""

KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "server_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
"""`type` of OpenAI's errors; every other status is an invalid_request_error."""


@dataclass
class RequestError(Exception):
    """A request that gets this status."""

    status: HTTPStatus
    message: str
    param: str | None = None
    """The field that is wrong, if it is one."""
    code: str | None = None
    """A word for programs."""
    headers: Mapping[str, str] = field(default_factory=dict)

    def document(self, path: str) -> dict[str, Any]:
        """For a request to this path."""
        return self.megatron() if path == MEGATRON else self.openai()

    def openai(self) -> dict[str, Any]:
        """As OpenAI's interface says it."""
        kind = KINDS.get(self.status, "invalid_request_error")
        named = {"param": self.param, "code": self.code}
        return {"error": {"message": self.message, "type": kind, **named}}

    def megatron(self) -> dict[str, str]:
        """As Megatron-LM's client reads it."""
        return {"message": self.message}


def bad_request(message: str, param: str | None = None) -> RequestError:
    """A request that can never be answered."""
    return RequestError(HTTPStatus.BAD_REQUEST, message, param)


def to_request_error(error: Exception) -> RequestError:
    """The answer to a request that raised this."""
    if isinstance(error, RequestError):
        return error
    retry = {"Retry-After": str(RETRY_SECONDS)}
    if isinstance(error, QueueFullError):
        return RequestError(HTTPStatus.TOO_MANY_REQUESTS, str(error), headers=retry)
    if isinstance(error, EngineFailedError):
        return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
    if isinstance(error, BrokenOutputError):
        return RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
    if isinstance(error, TimeoutError):
        return RequestError(
            HTTPStatus.GATEWAY_TIMEOUT, "the request took too long and was cancelled"
        )
    if isinstance(error, TrainyardError):
        return bad_request(in_fields(str(error)))
    text = "a defect of trainyard; see the log of this server"
    return RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, text)


def in_fields(message: str) -> str:
    """A message about flags, about fields of a request instead."""
    return shortened(FLAG.sub(lambda found: found[1].replace("-", "_"), message))
