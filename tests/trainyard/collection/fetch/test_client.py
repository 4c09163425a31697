"""What comes of a URL, with a server that misbehaves."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from tests.trainyard.collection.fetch.bad_server import PAGE, BadServer
from trainyard.collection.fetch import client
from trainyard.collection.fetch.addresses import AddressError, CheckedResolver, check_address
from trainyard.collection.fetch.client import Fetcher, Hosts, Outcome
from trainyard.collection.fetch.options import FetchConfig
from trainyard.errors import ConfigError

LOCAL = FetchConfig(
    allow_private_addresses=True, host_delay_seconds=0.0, request_timeout_seconds=1.5
)


@pytest.fixture
def server() -> Iterator[BadServer]:
    with BadServer() as made:
        yield made


def fetch(urls: list[str], config: FetchConfig = LOCAL, max_bytes: int = 100_000) -> list[Outcome]:
    """What came of each, in order."""
    found: dict[str, Outcome] = {}
    fetcher = Fetcher(config, max_bytes, Hosts())
    asyncio.run(fetcher.fetch_all(urls, lambda one: found.setdefault(one.url, one) and None))
    assert found.keys() == set(urls)
    return [found[url] for url in urls]


PATHS = {
    "/page": "",
    "/page?a=%2F%C3%A4": "",
    "/gzip": "",
    "/busy/1": "",
    "/failing/1": "",
    "/chain/5": "",
    "/chain/6": "redirects",
    "/circle": "redirects",
    "/file": "scheme",
    "/user": "scheme",
    "/malformed": "scheme",
    "/metadata": "address",
    "/private/y": "robots",
    "/forbidden": "robots",
    "/404": "status",
    "/503": "status",
    "/picture": "media_type",
    "/large": "too_large",
    "/endless": "too_large",
    "/short": "unreachable",
    "/nonsense": "unreachable",
    "/headers": "unreachable",
}


def test_each_page_comes_or_has_its_reason(server: BadServer) -> None:
    found = fetch([server.url(path) for path in PATHS])
    assert dict(zip(PATHS, [one.reason for one in found], strict=True)) == PATHS
    by_path = dict(zip(PATHS, found, strict=True))
    answer = by_path["/page"].answer
    assert answer is not None
    assert (answer.status, answer.body) == ("200 Status", PAGE)
    assert ("Content-Type", "text/html") in answer.headers
    chain = by_path["/chain/5"].answer
    assert chain is not None
    assert chain.url == server.url("/chain/0")
    assert by_path["/busy/1"].attempts == ["status 429", "status 429", "200 Status"]
    assert by_path["/failing/1"].attempts == ["status 500", "200 Status"]
    assert by_path["/503"].attempts == ["status 503"] * 3
    assert by_path["/404"].attempts == ["status 404"]
    paths = [path for _, path in server.asked]
    assert paths.count("/robots.txt") == 1
    assert "/private/x" not in paths
    assert "/page?a=%2F%C3%A4" in paths  # as the list has it


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/loris", "/silent"])
def test_a_server_that_keeps_one_waiting_is_left(path: str, server: BadServer) -> None:
    began = time.monotonic()
    config = FetchConfig(
        allow_private_addresses=True,
        host_delay_seconds=0.0,
        request_timeout_seconds=0.5,
        max_attempts=2,
    )
    (found,) = fetch([server.url(path)], config)
    assert (found.reason, found.attempts) == ("unreachable", ["it took too long"] * 2)
    assert time.monotonic() - began < 15


@pytest.mark.slow
def test_a_host_is_asked_one_page_at_a_time_with_a_delay(server: BadServer) -> None:
    config = FetchConfig(allow_private_addresses=True, host_delay_seconds=0.1)
    fetch([server.url(f"/page/{number}") for number in range(4)], config)
    times = [when for when, _ in server.asked]
    assert len(times) == 5
    assert min(b - a for a, b in pairwise(times)) > 0.05


@pytest.mark.parametrize(
    ("robots", "reason"), [(404, ""), (403, ""), (503, "robots"), ("User-agent: *\nDisallow:", "")]
)
def test_a_site_without_robots_may_be_read_and_one_that_fails_may_not(
    robots: str | int, reason: str
) -> None:
    with BadServer(robots) as server:
        (found,) = fetch([server.url("/page")])
    assert found.reason == reason


def test_nothing_on_this_machine_is_asked_unless_allowed(server: BadServer) -> None:
    urls = [server.url("/page", host) for host in ("127.0.0.1", "localhost", "2130706433")]
    urls += [f"http://[::1]:{server.port}/page", f"http://0.0.0.0:{server.port}/page"]
    urls += ["http://10.0.0.1/", "http://192.168.1.1/", "http://169.254.169.254/", "ftp://a.b/c"]
    found = fetch(urls, FetchConfig(host_delay_seconds=0.0, request_timeout_seconds=2.0))
    assert [one.reason for one in found] == ["address"] * 8 + ["scheme"]
    assert server.asked == []


@pytest.mark.parametrize(
    "address",
    ["10.1.2.3", "127.1", "::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "fc00::1", "224.0.0.1", "0"],
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(AddressError, match="is no public address"):
        check_address(address, allow_private=False)
    check_address(address, allow_private=True)


@pytest.mark.parametrize("address", ["169.254.169.254", "fe80::1", "fd00:ec2::254", "0xa9fea9fe"])
def test_metadata_services_are_refused_even_where_private_addresses_are_allowed(
    address: str,
) -> None:
    with pytest.raises(AddressError, match="metadata service"):
        check_address(address, allow_private=True)


class Rebinding(AbstractResolver):
    """A name that is public when it is asked for first, and this machine after that."""

    def __init__(self) -> None:
        self.answers = ["93.184.215.14", "127.0.0.1"]

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        address = self.answers.pop(0)
        return [ResolveResult(hostname=host, host=address, port=port, family=2, proto=0, flags=0)]

    async def close(self) -> None:
        pass


def test_the_address_that_is_connected_to_is_the_one_that_is_checked(
    server: BadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Rebinding()
    names.answers = ["127.0.0.1"]
    monkeypatch.setattr(
        client, "CheckedResolver", lambda allow_private: CheckedResolver(allow_private, names)
    )
    (found,) = fetch([server.url("/page", "rebinding.example.org")], FetchConfig(max_attempts=1))
    assert (found.reason, server.asked, names.answers) == ("address", [], [])
    names.answers = ["127.0.0.1"] * 2  # one for each connection: none is made without a check
    (found,) = fetch([server.url("/page", "rebinding.example.org")], LOCAL)
    assert (found.reason, names.answers) == ("", [])


def test_only_the_options_that_can_be_are_taken() -> None:
    for options, message in (
        ({"user_agent": "a\nb"}, "--user-agent"),
        ({"user_agent": " /1"}, "--user-agent"),
        ({"max_redirects": 21}, "--max-redirects"),
        ({"request_timeout_seconds": 0.0}, "--request-timeout-seconds"),
    ):
        with pytest.raises(ConfigError, match=message):
            FetchConfig(**options)  # type: ignore[arg-type]
