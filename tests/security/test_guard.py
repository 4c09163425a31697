"""The guard before Prefect's server, without one: names, origins, and what it adds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from flows.server.guard import Guarded, Message, Receive, Send
from tests.security.attacks import EVIL, HOSTS, LOG_INS, ORIGINS, basic

PORT = 4200
HOST = f"127.0.0.1:{PORT}"


async def served(scope: Message, receive: Receive, send: Send) -> None:
    """Prefect's server: a request that gets here is answered."""
    kind = "websocket" if scope["type"] == "websocket" else "http.response"
    await send({"type": f"{kind}.start", "status": 200, "headers": [(b"x", b"y")]})


def first(*headers: tuple[str, str], kind: str = "http", path: str = "/", **traits: Any) -> Message:
    """The first message of the answer to a request."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read of what is refused")

    encoded = [(k.encode(), v.encode("latin-1")) for k, v in headers]
    scope = {"type": kind, "path": path, "headers": encoded}
    asyncio.run(Guarded(served, **traits)(scope, receive, send))
    return sent[0]


@pytest.mark.parametrize("host", ["127.0.0.1", HOST, "localhost", "LocalHost:1", "[::1]:80"])
def test_its_own_names_are_let_in_at_any_port(host: str) -> None:
    assert first(("host", host))["status"] == 200
    assert first(("host", host), ("origin", f"http://{host}"))["status"] == 200


@pytest.mark.parametrize(
    "pattern", [*HOSTS, " ", "a b", "[::1", "127.0.0.1:x", "127.0.0.1,evil.example", "\xe9"]
)
def test_other_names_are_not(pattern: str) -> None:
    assert first(("host", pattern.format(port=PORT)))["status"] in (400, 421)


@pytest.mark.parametrize("hosts", [(), (HOST, EVIL), (EVIL, HOST), (HOST, HOST)])
def test_one_header_host_is_wanted(hosts: tuple[str, ...]) -> None:
    assert first(*[("host", one) for one in hosts])["status"] == 400


@pytest.mark.parametrize("pattern", [*ORIGINS, HOST, f"ftp://{HOST}", f"http://{HOST}/", "http://"])
def test_pages_of_other_origins_are_refused(pattern: str) -> None:
    origin = ("origin", pattern.format(port=PORT))
    assert first(("host", HOST), origin)["status"] == 403
    both = (("origin", f"http://{HOST}"), origin)
    assert first(("host", HOST), *both)["status"] == 403
    answer = first(("host", HOST), origin, kind="websocket")
    assert answer["type"] == "websocket.close"


def test_a_name_may_be_allowed_and_every_address() -> None:
    assert first(("host", "yard.example:443"), names=["Yard.Example"])["status"] == 200
    assert first(("host", "10.0.0.7:4200"), any_address=True)["status"] == 200
    assert first(("host", "[fe80::1]:4200"), any_address=True)["status"] == 200
    assert first(("host", f"10.0.0.7.{EVIL}"), any_address=True)["status"] == 421


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://yard.example", 200),
        ("https://yard.example:8443", 200),
        ("https://yard.example.evil.example", 403),
        ("https://yard.example@evil.example", 403),
        ("http://localhost:1", 403),
        ("http://0.0.0.0:1", 403),
        ("ftp://yard.example", 403),
    ],
)
def test_pages_behind_a_proxy_are_known_by_its_name(origin: str, status: int) -> None:
    names = ["0.0.0.0", "localhost", "yard.example"]
    assert first(("host", HOST), ("origin", origin), names=names)["status"] == status


def test_no_page_may_frame_what_it_answers() -> None:
    headers = first(("host", HOST))["headers"]
    assert headers == [(b"x", b"y"), (b"content-security-policy", b"frame-ancestors 'none'")]


@pytest.mark.parametrize("path", ["/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"])
def test_pages_that_run_scripts_of_other_sites_are_not_served(path: str) -> None:
    assert first(("host", HOST), path=path)["status"] == 404


def test_credentials_that_prefect_cannot_compare_are_wrong_ones() -> None:
    for given, status in ((basic("\xe9:\xfc"), 401), (basic("trainyard:x"), 200), ("Basic", 200)):
        assert first(("host", HOST), ("authorization", given))["status"] == status


def test_a_password_that_comes_twice_ends_the_connection() -> None:
    """Prefect's server would log it as a broken event."""
    told = {"type": "websocket.receive", "text": '{"type":"auth","token":"u:p"}'}
    event = {"type": "websocket.receive", "text": '{"occurred":"now"}'}
    coming, got = [told, event, told], list[Message]()

    async def reading(scope: Message, receive: Receive, send: Send) -> None:
        got.extend([await receive() for _ in range(3)])

    async def receive() -> Message:
        return coming.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope = {"type": "websocket", "path": "/api/events/in", "headers": [(b"host", HOST.encode())]}
    asyncio.run(Guarded(reading)(scope, receive, send))
    assert got == [told, event, {"type": "websocket.disconnect", "code": 1008}]


@pytest.mark.parametrize("given", LOG_INS, ids=lambda text: str(text[:40]))
def test_prefect_can_compare_the_token_of_every_websocket(given: str | bytes) -> None:
    key = "text" if isinstance(given, str) else "bytes"
    got = [json.loads(message["text"]) for message in passed_on({key: given}, {"text": "[7]"})]
    assert got[1] == [7]
    token = got[0].get("token")
    assert token is None or (isinstance(token, str) and token.isascii())


def test_the_password_gets_to_prefect() -> None:
    log_in = '{"type": "auth", "token": "trainyard:x"}'
    (message,) = passed_on({"text": log_in})
    assert message["text"] == log_in


def passed_on(*messages: dict[str, Any]) -> list[Message]:
    """What Prefect's server receives of the messages of a websocket."""
    got: list[Message] = []
    waiting = [{"type": "websocket.receive", **message} for message in messages]

    async def app(_: Message, receive: Receive, __: Send) -> None:
        got.extend([await receive() for _ in messages])

    async def receive() -> Message:
        return waiting.pop(0)

    async def send(_: Message) -> None:
        raise AssertionError("it is let in")

    scope = {"type": "websocket", "path": "/api/events/out", "headers": [(b"host", HOST.encode())]}
    asyncio.run(Guarded(app)(scope, receive, send))
    return got
