"""What every request passes before a route sees it, and its line in the access log.

A page of another site must not use the server of whoever looks at it: foreign host names (DNS
rebinding), foreign origins and bodies that are not declared as JSON, which a form could send, are
refused, and no header allows an origin to read an answer. Compares keys in constant time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias

from trainyard.hosts import RULE, host_name, not_ours
from trainyard.serving import access
from trainyard.serving.errors import RequestError, to_request_error
from trainyard.serving.metrics import Metrics

log = logging.getLogger(__name__)

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

PUBLIC = frozenset({"/", "/page.css", "/page.js", "/health", "/v1/health", "/health/live"})
PUBLIC |= {"/health/ready"}
"""Paths that need no key."""
DISCARDED_BYTES = 64 * 2**20
DISCARD_SECONDS, PAUSE_SECONDS = 10.0, 1.0
"""How much of the body of a refused request is read, for how long, and without anything coming. The
rest is cut off: the connection is reset, and a client that still sends may not see the answer."""
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


@dataclass
class Exchange:
    """One request and what became of it."""

    scope: Message
    headers: dict[bytes, list[bytes]] = field(default_factory=dict)
    status: int = 0
    """Of the answer; 0 before it begins."""

    def __post_init__(self) -> None:
        for name, value in self.scope["headers"]:
            self.headers.setdefault(name.lower(), []).append(value)

    @property
    def path(self) -> str:
        """Of the request."""
        path: str = self.scope["path"]
        return path

    def one(self, name: bytes) -> str:
        """The value of a header, or "" if there is not exactly one."""
        found = self.headers.get(name, [])
        return found[0].decode("latin-1") if len(found) == 1 else ""

    def all(self, name: bytes) -> list[str]:
        """All values of a header."""
        return [value.decode("latin-1") for value in self.headers.get(name, [])]


class Guard:
    """Wraps an ASGI application."""

    def __init__(
        self,
        app: App,
        *,
        names: frozenset[str],
        key: str | None,
        max_body_bytes: int,
        metrics: Metrics,
    ) -> None:
        """names: hosts that requests may be for. key: that clients must send; None: none."""
        self._app, self._names, self._metrics = app, names, metrics
        self._key = None if key is None else _digest(key)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
                return
            raise ValueError(f"no {scope['type']} is served")
        exchange, notes, began = Exchange(scope), access.begin(), time.perf_counter()
        try:
            await self._answer(exchange, receive, send)
        finally:
            seconds = time.perf_counter() - began
            path, method = exchange.path, scope["method"]
            self._metrics.answered(path, method, exchange.status, seconds)
            client = (scope.get("client") or ("",))[0]
            head = {"client": client, "method": method, "path": path, "status": exchange.status}
            access.write({**head, "seconds": round(seconds, 6), **notes})

    async def _answer(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        body = Body(exchange, receive, self._max_body_bytes)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                if exchange.status >= HTTPStatus.BAD_REQUEST:
                    await body.discard()
                message["headers"] = [*message.get("headers", []), *SECURITY_HEADERS]
            await send(message)

        try:
            self._check(exchange)
            await self._app(exchange.scope, body.receive, marked)
        except Exception as error:
            if exchange.status:  # whatever is missing is for the client to see
                log.exception("%s", exchange.path)
                return
            await _send_error(to_request_error(error), exchange.path, marked)

    def _check(self, exchange: Exchange) -> None:
        """Raise RequestError for a request that no route may see."""
        hosts = exchange.all(b"host")
        name = host_name(hosts)
        if name is None:
            raise RequestError(HTTPStatus.BAD_REQUEST, RULE)
        if name not in self._names:
            raise RequestError(HTTPStatus.MISDIRECTED_REQUEST, not_ours(name))
        for origin in exchange.all(b"origin"):
            if origin.partition("://")[2].lower() != hosts[0].lower():
                raise RequestError(
                    HTTPStatus.FORBIDDEN, "pages of other origins may not use this server"
                )
        if self._key is not None and exchange.path not in PUBLIC:
            scheme, _, given = exchange.one(b"authorization").partition(" ")
            is_right = hmac.compare_digest(_digest(given.strip()), self._key)
            if scheme.lower() != "bearer" or not is_right:
                raise RequestError(
                    HTTPStatus.UNAUTHORIZED,
                    "send the key of this server as `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        if exchange.scope["method"] in ("POST", "PUT"):
            kind = exchange.one(b"content-type").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise RequestError(
                    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                    "send the request as JSON, with `Content-Type: application/json`",
                )
        length = exchange.one(b"content-length")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)


class Body:
    """The body of a request."""

    def __init__(self, exchange: Exchange, receive: Receive, most: int) -> None:
        """most: bytes that a route may read of it."""
        self._receive, self._most = receive, most
        self._waits = bool(exchange.all(b"expect"))
        self._length = exchange.one(b"content-length")
        self._seen, self._has_ended = 0, False

    async def receive(self) -> Message:
        """See ASGI. RequestError for a body that is larger than its limit."""
        message = await self._read()
        if self._seen > self._most:
            raise _too_large(self._most)
        return message

    async def discard(self) -> None:
        """Read the rest, before an answer that ends the connection: most clients send all of a
        request before they look for its answer."""
        if self._length.isdigit() and int(self._length[:20]) > DISCARDED_BYTES:
            return
        if self._waits and not self._seen:  # for "100 Continue", which it does not get
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self._has_ended and self._seen <= DISCARDED_BYTES:
                    await asyncio.wait_for(self._read(), PAUSE_SECONDS)

    async def _read(self) -> Message:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        self._has_ended = not message.get("more_body", False)
        return message


def _too_large(most: int) -> RequestError:
    return RequestError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request may have at most {most} bytes"
    )


def _digest(text: str) -> bytes:
    """Of equal length for texts of any length, so that a comparison tells nothing of it."""
    return hashlib.sha256(text.encode("latin-1", "replace")).digest()


async def _send_error(error: RequestError, path: str, send: Send) -> None:
    body = json.dumps(error.document(path)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(k.lower().encode(), v.encode()) for k, v in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
