"""The guard in front of Prefect's server, which without it answers pages of any site.

It refuses requests under a foreign host name and from pages of other origins, and forbids framing.
Prefect checks the password; the guard only refuses credentials that Prefect cannot compare, and a
password that comes a second time."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any, NamedTuple, TypeAlias

from trainyard import json_text
from trainyard.hosts import OURS, RULE, host_name, not_ours

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]
"""An ASGI application."""

UNFRAMED = (b"content-security-policy", b"frame-ancestors 'none'")

OF_OTHERS = frozenset({"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"})
"""Pages about the API. They run scripts of other sites, which could read the password of our pages
from the browser."""

PASSWORD = '{"type":"auth"'
"""Begins the message with which a client of events logs in."""

WITHOUT_TOKEN = '{"type": "auth", "token": null}'
"""The first message of a websocket, which Prefect answers by closing it."""


class Refusal(NamedTuple):
    """Why a request is refused."""

    status: HTTPStatus
    text: str


class Guarded:
    """An application that pages of other origins cannot reach."""

    def __init__(self, app: App, names: Iterable[str] = (), any_address: bool = False) -> None:
        """names: host names that it answers to besides those of this machine, such as those of
        proxies. any_address: it answers to every IP address too, which no page can forge."""
        given = {name.lower() for name in names}
        self._app = app
        self._names = OURS | given
        self._proxies = {name for name in given - OURS if not _is_address(name)}
        self._any_address = any_address

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["headers"]) or _of_request(scope)
        if refusal is None:
            if scope["type"] == "websocket":
                receive = _comparable_token(_password_once(receive))
            await self._app(scope, receive, _unframed(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal.text})
        else:
            await answer(send, refusal.status, f"{refusal.text}\n".encode(), b"text/plain")

    def _refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> Refusal | None:
        hosts, origins = (
            [value.decode("latin-1").lower() for key, value in headers if key == wanted]
            for wanted in (b"host", b"origin")
        )
        name = host_name(hosts)
        if name is None:
            return Refusal(HTTPStatus.BAD_REQUEST, RULE)
        if name not in self._names and not (self._any_address and _is_address(name)):
            return Refusal(HTTPStatus.MISDIRECTED_REQUEST, not_ours(name))
        for origin in origins:
            scheme, _, host = origin.partition("://")
            is_own = host == hosts[0] or host_name([host]) in self._proxies
            if scheme not in ("http", "https") or not is_own:
                text = f"a page of {origin} asks: only our own pages may"
                return Refusal(HTTPStatus.FORBIDDEN, text)
        return None


async def answer(
    send: Send, status: HTTPStatus, body: bytes, kind: bytes, *more: tuple[bytes, bytes]
) -> None:
    """Send a whole response."""
    length = (b"content-length", b"%d" % len(body))
    headers = [(b"content-type", kind + b"; charset=utf-8"), length, *more]
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _of_request(scope: Message) -> Refusal | None:
    """Refuse requests that no client may make."""
    if scope["path"] in OF_OTHERS:
        return Refusal(HTTPStatus.NOT_FOUND, "pages about the API are not served here")
    for key, value in scope["headers"]:
        if key == b"authorization" and not _is_comparable(value):
            return Refusal(HTTPStatus.UNAUTHORIZED, "a password must be ASCII")
    return None


def _is_comparable(authorization: bytes) -> bool:
    """False for credentials on which Prefect's own comparison raises."""
    try:
        return base64.b64decode(authorization.split()[-1]).isascii()
    except (IndexError, ValueError):
        return True  # malformed: Prefect refuses it


def _password_once(receive: Receive) -> Receive:
    """Ends a connection on which the password comes again.

    A client of Prefect that reconnects may do that; the server would take it for a broken event and
    log it with the password. The client then connects anew."""
    has_come = False

    async def receive_once() -> Message:
        nonlocal has_come
        message = await receive()
        if (message.get("text") or "").startswith(PASSWORD):
            if has_come:
                return {"type": "websocket.disconnect", "code": 1008}
            has_come = True
        return message

    return receive_once


def _comparable_token(receive: Receive) -> Receive:
    """The messages of a websocket, whose first one logs in: without a token where Prefect's own
    comparison would raise."""
    is_first = True

    async def checked() -> Message:
        nonlocal is_first
        message = await receive()
        if is_first and message["type"] == "websocket.receive":
            is_first = False
            if not _is_log_in(message.get("text")):
                return {**message, "text": WITHOUT_TOKEN, "bytes": None}
        return message

    return checked


def _is_log_in(text: str | None) -> bool:
    try:
        message = json_text.loads(text or "")
    except ValueError:
        return False
    token = message.get("token") if isinstance(message, dict) else 0
    return token is None or (isinstance(token, str) and token.isascii())


def _unframed(send: Send) -> Send:
    async def add_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), UNFRAMED]}
        await send(message)

    return add_header


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
