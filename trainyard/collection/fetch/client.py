"""Fetches pages: one connection a host, with a delay, as its robots.txt allows, and within bounds.

What comes of a URL is a pure function of what servers answer: the page, or the reason why there is
none, with every attempt."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

import aiohttp
from yarl import URL

from trainyard.artifacts.urls import show_url
from trainyard.collection.fetch.addresses import AddressError, CheckedResolver, check_address
from trainyard.collection.fetch.options import FetchConfig
from trainyard.collection.fetch.robots import (
    ALLOW_ALL,
    ALLOW_NONE,
    MAX_BYTES,
    Robots,
    parse_robots,
)

ROBOTS, ADDRESS, SCHEME, REDIRECTS = "robots", "address", "scheme", "redirects"
STATUS, MEDIA_TYPE, TOO_LARGE, UNREACHABLE = "status", "media_type", "too_large", "unreachable"
REASONS = (ROBOTS, ADDRESS, SCHEME, REDIRECTS, STATUS, MEDIA_TYPE, TOO_LARGE, UNREACHABLE)

HTML_TYPES = ("text/html", "application/xhtml+xml")
REDIRECTING = (301, 302, 303, 307, 308)
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which a page may come at another time."""
MAX_RETRY_SECONDS = 120.0
"""The longest time that a server may ask to wait."""
CONNECT_SECONDS = 15.0
CHUNK_BYTES = 1 << 16
MAX_URL_CHARS = 4096
CONTROL = re.compile("[\x00-\x1f\x7f]")
TOO_LONG = "it took too long"
MAX_TIMEOUTS = 20
"""Answers of a host that may take too long; then the rest of its batch is not asked for."""
MAX_SITES = 500
"""Sites whose robots.txt is kept: a list may name millions, and a site may have megabytes."""

HEADERS = {"Accept": "text/html,application/xhtml+xml", "Accept-Encoding": "gzip, deflate"}


class Answer(NamedTuple):
    """A page as its server sent it; the body may be compressed, as its headers say."""

    url: str
    """After all redirects."""
    status: str
    """Such as `200 OK`."""
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(slots=True)
class Outcome:
    """The outcome of fetching a URL."""

    url: str
    answer: Answer | None = None
    reason: str = ""
    """Why there is no page; empty: there is one."""
    why: str = ""
    attempts: list[str] = field(default_factory=list)
    """What each attempt ended with."""


class FetchError(Exception):
    """Why a URL gives no page. wait_seconds: time after which it may; None: it never does."""

    def __init__(self, reason: str, why: str, wait_seconds: float | None = None) -> None:
        super().__init__(why)
        self.reason, self.why, self.wait_seconds = reason, why, wait_seconds


FAULTS = (FetchError, AddressError, TimeoutError, aiohttp.ClientError, OSError, ValueError)
"""What the wrong URL or server raises; ValueError: of a URL that is none."""


class Hosts:
    """What is known of hosts, kept from one batch of URLs to the next."""

    def __init__(self) -> None:
        self.robots: dict[str, Robots] = {}
        """By scheme and host: of the last MAX_SITES."""
        self.free_at: dict[str, float] = {}
        """By host: when it may be asked again, by the clock of time.monotonic()."""

    def keep(self, site: str, robots: Robots) -> Robots:
        """Note the robots.txt of a site, in place of the oldest if there are too many."""
        self.robots[site] = robots
        if len(self.robots) > MAX_SITES:
            del self.robots[next(iter(self.robots))]
        return robots


class Fetcher:
    """Fetches batches of URLs."""

    def __init__(self, config: FetchConfig, max_bytes: int, hosts: Hosts) -> None:
        self._config, self._max_bytes, self._hosts = config, max_bytes, hosts

    async def fetch_all(self, urls: Sequence[str], done: Callable[[Outcome], None]) -> None:
        """Fetch pages and yield the outcome of each URL, in any order."""
        by_host: dict[str, list[str]] = {}
        for url in urls:
            by_host.setdefault(_host(url), []).append(url)
        limit = asyncio.Semaphore(self._config.connections)
        connector = aiohttp.TCPConnector(
            resolver=CheckedResolver(self._config.allow_private_addresses),
            limit=0,
            use_dns_cache=False,
            force_close=True,
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                headers={**HEADERS, "User-Agent": self._config.user_agent},
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(
                    total=self._config.request_timeout_seconds, sock_connect=CONNECT_SECONDS
                ),
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for mine in by_host.values():
                tasks.create_task(self._fetch_host(session, mine, limit, done))

    async def _fetch_host(
        self,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        limit: asyncio.Semaphore,
        done: Callable[[Outcome], None],
    ) -> None:
        """The pages of a host, one after another; those to try again come after all others."""
        waiting, timeouts = [(0.0, Outcome(url)) for url in urls], 0
        while waiting and timeouts < MAX_TIMEOUTS:
            waiting.sort(key=lambda one: one[0])
            not_before, outcome = waiting.pop(0)
            await asyncio.sleep(max(0.0, not_before - time.monotonic()))
            try:
                async with limit:
                    outcome.answer = await self._page(session, outcome.url)
                outcome.attempts.append(outcome.answer.status)
                outcome.reason = outcome.why = ""
            except FAULTS as error:
                fault = _as_fault(error)
                outcome.reason, outcome.why = fault.reason, fault.why
                outcome.attempts.append(fault.why)
                timeouts += fault.why == TOO_LONG
                tries = len(outcome.attempts)
                if fault.wait_seconds is not None and tries < self._config.max_attempts:
                    pause = max(fault.wait_seconds, self._config.host_delay_seconds * 2**tries)
                    waiting.append((time.monotonic() + min(pause, MAX_RETRY_SECONDS), outcome))
                    continue
            done(outcome)
        for _, outcome in waiting:
            outcome.reason = UNREACHABLE
            outcome.why = f"its host took too long {MAX_TIMEOUTS} times; fetch it in another run"
            done(outcome)

    async def _page(self, session: aiohttp.ClientSession, url: str) -> Answer:
        seen = set()
        for _ in range(self._config.max_redirects + 1):
            if url in seen:
                raise FetchError(REDIRECTS, f"redirects in a circle, to {url[:200]}")
            seen.add(url)
            self._check_url(url)
            robots = await self._robots(session, url)
            if not robots.allows(url):
                raise FetchError(ROBOTS, "its robots.txt does not allow it")
            found = await self._get(session, url, robots.delay_seconds, self._max_bytes, HTML_TYPES)
            if isinstance(found, Answer):
                return found
            url = found
        raise FetchError(REDIRECTS, f"more than {self._config.max_redirects} redirects")

    def _check_url(self, url: str) -> None:
        if len(url) > MAX_URL_CHARS:
            raise FetchError(SCHEME, f"a URL of more than {MAX_URL_CHARS} characters")
        if CONTROL.search(url):
            raise FetchError(SCHEME, "a URL with a control character, such as a line feed")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise FetchError(SCHEME, f"no http:// or https:// URL: {show_url(url)[:80]}")
        if "@" in parts.netloc:
            raise FetchError(SCHEME, "a URL with a user")
        # As it is connected to: a full-width 127.0.0.1 has become one that needs no resolver.
        check_address(_target(url).raw_host or "", self._config.allow_private_addresses)

    async def _robots(self, session: aiohttp.ClientSession, url: str) -> Robots:
        """The robots.txt of a site. Without one all is allowed; if its server fails, nothing is
        (RFC 9309, 2.3.1)."""
        parts = urlsplit(url)
        site = f"{parts.scheme}://{parts.netloc}"
        known = self._hosts.robots.get(site)
        if known is not None:
            return known
        return self._hosts.keep(site, await self._read_robots(session, f"{site}/robots.txt"))

    async def _read_robots(self, session: aiohttp.ClientSession, url: str) -> Robots:
        for _ in range(self._config.max_redirects + 1):
            self._check_url(url)
            try:
                found = await self._get(session, url, 0.0, MAX_BYTES, None)
            except FetchError as error:
                if error.reason == STATUS and error.wait_seconds is None:
                    return ALLOW_ALL
                if error.reason == STATUS:
                    return ALLOW_NONE
                raise
            if isinstance(found, Answer):
                return parse_robots(found.body, self._config.user_agent)
            url = found
        return ALLOW_ALL

    async def _get(
        self,
        session: aiohttp.ClientSession,
        url: str,
        delay_seconds: float,
        max_bytes: int,
        types: Sequence[str] | None,
    ) -> Answer | str:
        """The answer, or the URL that it redirects to. types: media types to read; None: any, of
        which the first `max_bytes` are enough."""
        await self._wait_for(_host(url), max(delay_seconds, self._config.host_delay_seconds))
        headers = {"Accept-Encoding": "identity"} if types is None else {}
        async with session.get(_target(url), allow_redirects=False, headers=headers) as response:
            if response.status in REDIRECTING and "Location" in response.headers:
                return urljoin(url, response.headers["Location"].strip()).partition("#")[0]
            if response.status != 200:
                raise _bad_status(response)
            if types is not None and response.content_type not in types:
                raise FetchError(MEDIA_TYPE, f"media type {response.content_type[:80]}")
            body = bytearray()
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                body += chunk
                if len(body) > max_bytes and types is None:
                    break
                if len(body) > max_bytes:
                    raise FetchError(TOO_LARGE, f"the page has more than {max_bytes} bytes")
            kept = [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in response.raw_headers
                if name.lower() != b"transfer-encoding"
            ]
            return Answer(url, _status_line(response), tuple(kept), bytes(body[:max_bytes]))

    async def _wait_for(self, host: str, delay_seconds: float) -> None:
        """Wait until a host may be asked, which then is not free for the delay."""
        now = time.monotonic()
        free_at = max(self._hosts.free_at.get(host, 0.0), now)
        self._hosts.free_at[host] = free_at + delay_seconds
        await asyncio.sleep(free_at - now)


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _target(url: str) -> URL:
    """The URL as it is, or as its server sent it: nothing is to be quoted a second time."""
    return URL(url, encoded=url.isascii() and " " not in url)


def _status_line(response: aiohttp.ClientResponse) -> str:
    """Such as `200 OK`: of a reason in any bytes, what is printable ASCII."""
    printable = re.sub("[^ -~]", "?", response.reason or "")
    return f"{response.status} {printable[:80]}".strip()


def _bad_status(response: aiohttp.ClientResponse) -> FetchError:
    wait_seconds = None
    if response.status in TRANSIENT:
        asked = response.headers.get("Retry-After", "").strip()
        wait_seconds = float(asked) if asked.isdecimal() and len(asked) < 10 else 0.0
    return FetchError(STATUS, f"status {response.status}", wait_seconds)


def _as_fault(error: Exception) -> FetchError:
    if isinstance(error, FetchError):
        return error
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, AddressError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return FetchError(ADDRESS, str(cause))
    if isinstance(error, ValueError):
        return FetchError(SCHEME, "no valid URL")  # what the error quotes may be a password
    if isinstance(error, TimeoutError):
        return FetchError(UNREACHABLE, TOO_LONG, 0.0)
    return FetchError(UNREACHABLE, type(error).__name__, 0.0)
