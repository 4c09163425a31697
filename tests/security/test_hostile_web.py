"""Lists of URLs and web servers of others, through `stages.collect --source fetch` and then warc:
no private address, no forged record, no password in a ledger, and no answer that ends the run."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from stages.collect import run as collect_run
from stages.collect.config import CollectConfig
from tests.stages.clean_runs import rows, write
from tests.stages.directly import run_directly
from tests.trainyard.collection.fetch.bad_server import PAGE, BadServer
from trainyard.artifacts import store
from trainyard.collection.fetch import client
from trainyard.collection.fetch.client import Fetcher, Hosts, Outcome
from trainyard.collection.fetch.options import FetchConfig
from trainyard.collection.fetch.robots import ALLOW_ALL
from trainyard.collection.fetch.url_list import listed_urls
from trainyard.corpus.formats.records import ByteRange
from trainyard.errors import DataError

SECRET = "hunter2"
MANY = 10**9

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n"
FOUND = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nConnection: close\r\nLocation: "


def sized(body: bytes) -> bytes:
    """A body behind its length."""
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


BODY = sized(PAGE)


def packed(encoding: str, body: bytes) -> bytes:
    """A page in an encoding."""
    return OK + f"Content-Encoding: {encoding}\r\n".encode() + sized(body)


ANSWERS: dict[str, tuple[bytes, bytes, str]] = {
    "hints without end": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 500, "unreachable"),
    "patience without end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 500, "unreachable"),
    "another protocol": (b"HTTP/1.1 101 Other\r\nUpgrade: a\r\n\r\n", b"x" * 9999, "status"),
    "a status without end": (b"HTTP/1.1 200 ", b"x" * 9999, "unreachable"),
    "a field without end": (OK + b"X: ", b"x" * 9999, "unreachable"),
    "a chunk's extension": (
        OK + b"Transfer-Encoding: chunked\r\n\r\n5;",
        b"a" * 9999,
        "unreachable",
    ),
    "trailers without end": (
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n",
        b"A: b\r\n" * 1000,
        "unreachable",
    ),
    "small chunks": (
        OK + b"Transfer-Encoding: chunked\r\n\r\n",
        b"1\r\na\r\n" * 999,
        "unreachable",
    ),
    "a page without end": (OK + b"\r\n", b"x" * 9999, "too_large"),
    "a length below zero": (OK + b"Content-Length: -1\r\n\r\nx", b"", "unreachable"),
    "a length of digits": (OK + b"Content-Length: " + b"9" * 99 + b"\r\n\r\nx", b"", "unreachable"),
    "two lengths": (OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxy", b"", "unreachable"),
    "a reason of bytes": (OK.replace(b"OK", b"\xe9\xff") + BODY, b"", ""),
    "a reason of escapes": (OK.replace(b"OK", b"\x1b]0;owned\x07") + BODY, b"", ""),
    "a field of bytes": (OK + b"X: \xe9\xff\x1b[1m\r\n" + BODY, b"", ""),
    "a folded field": (OK + b"X: a\r\n WARC-Type: b\r\n" + BODY, b"", ""),
    "NUL in a field": (OK + b"X: a\0b\r\n" + BODY, b"", "unreachable"),
    "a type of escapes": (
        OK.replace(b"text/html", b"text/\x1b]0;owned") + BODY,
        b"",
        "media_type",
    ),
    "a date that is none": (OK + b"Date: Mon, 99 Jan 0001 99:00:00 +9999\r\n" + BODY, b"", ""),
    "a date before dates": (OK + b"Date: Mon, 01 Jan 0001 00:00:00 +2359\r\n" + BODY, b"", ""),
    "a record in a page": (OK + sized(b"\r\n\r\nWARC/1.1\r\n\r\n" + PAGE), b"", ""),
    "a bomb of gzip": (packed("gzip", gzip.compress(bytes(50 << 20), 1)), b"", ""),
    "a bomb of deflate": (packed("deflate", zlib.compress(bytes(50 << 20), 1)), b"", ""),
    "a bomb in a bomb": (packed("gzip, gzip", gzip.compress(gzip.compress(PAGE))), b"", ""),
    "gzip that is none": (packed("gzip", b"\x1f\x8b" + PAGE), b"", ""),
    "an unknown encoding": (packed("\x1b]0;owned", PAGE), b"", ""),
    "to escapes": (FOUND + b"/\x1b]0;owned\r\n\r\n", b"", "scheme"),
    "to bytes": (FOUND + b"/\xff\xfe\r\n\r\n", b"", "scheme"),
    "to a password": (FOUND + f"ftp://me:{SECRET}@h/\r\n\r\n".encode(), b"", "scheme"),
    "to a user": (FOUND + f"http://me:{SECRET}@h/\r\n\r\n".encode(), b"", "scheme"),
    "to a half": (FOUND + f"http://me:{SECRET}@[h/\r\n\r\n".encode(), b"", "scheme"),
    "to a file": (FOUND + b"file:///etc/passwd\r\n\r\n", b"", "scheme"),
    "to data": (FOUND + b"data:text/html,a\r\n\r\n", b"", "scheme"),
    "to nothing": (FOUND + b"\r\n\r\n", b"", "redirects"),
    "to metadata": (FOUND + b"//169.254.169.254/\r\n\r\n", b"", "address"),
    "to wide digits": (
        FOUND + "http://\uff11\uff16\uff19.254.169.254/\r\n\r\n".encode(),
        b"",
        "address",
    ),
    "to round digits": (FOUND + "http://\u246069.254.169.254/\r\n\r\n".encode(), b"", "address"),
}
"""What a server sends: once, then again and again, and what is to come of the page."""


class RawServer(BadServer):
    """Sends bytes of the table; anything else is a page."""

    async def _send(self, path: str, writer: asyncio.StreamWriter) -> None:
        kind = path.strip("/").replace("_", " ")
        if kind not in ANSWERS:
            return await super()._send(path, writer)
        first, again, _ = ANSWERS[kind]
        writer.write(first)
        for _ in range(MANY if again else 0):
            writer.write(again)
            await writer.drain()
            await asyncio.sleep(0)


QUICK = {"host_delay_seconds": 0.0, "request_timeout_seconds": 1.0, "max_attempts": 1}
LOCAL = FetchConfig(allow_private_addresses=True, **QUICK)  # type: ignore[arg-type]


def fetch(urls: list[str], config: FetchConfig = LOCAL) -> list[Outcome]:
    """What came of each, in order."""
    found: dict[str, Outcome] = {}
    fetcher = Fetcher(config, 100_000, Hosts())
    asyncio.run(fetcher.fetch_all(urls, lambda one: found.setdefault(one.url, one) and None))
    return [found[url] for url in urls]


# --- lists ----------------------------------------------------------------------------------------

PRIVATE = [
    *("127.0.0.1", "127.1", "0x7f.1", "0x7f000001", "0177.0.0.1", "017700000001", "2130706433"),
    *("0", "0.0.0.0", "[::1]", "[::]", "[::1%25lo]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
    *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "127.0.0.1%00", "127.0.0.1%2f", "LocalHost"),
    # Digits and full stops of other scripts, which become an address when the host is encoded.
    *(
        "\uff11\uff12\uff17.0.0.1",
        "\u2460\u2461\u2466.\u24ea.\u24ea.\u2460",
        "127\u30020\u30020\uff611",
    ),
    "\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3",
]
"""Spellings of this machine."""


def test_no_spelling_of_a_host_leads_to_this_machine() -> None:
    with RawServer() as server:
        urls = [f"http://{host}:{server.port}/page" for host in PRIVATE]
        found = fetch(urls, FetchConfig(**QUICK))  # type: ignore[arg-type]
        assert {one.url: one.reason for one in found} == dict.fromkeys(urls, "address")
        assert server.asked == []


FORGED = "\r\nWARC-Type: metadata\r\nX-Evil: 1\r\n\r\n"
LISTED = {
    "a line feed": ("/page" + FORGED, "scheme"),
    "a line feed in the query": ("/page?a=" + FORGED, "scheme"),
    "a second request": ("/page HTTP/1.1\r\nHost: evil\r\n\r\nGET /b", "scheme"),
    "a tab": ("/pa\tge", "scheme"),
    "NUL": ("/\0", "scheme"),
    "an escape": ("/\x1b]0;owned\x07", "scheme"),
    "half a character": ("/\ud800", "scheme"),
    "other line ends": ("/page\u2028\u2029\x85", ""),
    "a mark of direction": ("/page\u202e", ""),
    "a blank": ("/page b", ""),
    "no escape": ("/page%zz%", ""),
    "a way out": ("/page/../../../../etc/passwd", ""),
    "a long path": ("/" + "a" * 5000, "scheme"),
}
"""What follows the server's name."""
WITH_PASSWORD = [
    f"http://me:{SECRET}@a.example/b",
    f"https://me:{SECRET}@127.0.0.1/",
    f"ftp://me:{SECRET}@a.example/b",
    f"http://me:{SECRET}@[a.example/b",
    f"http://me:{SECRET}@a.example\uff0f/b",
    f"http://me:{SECRET}/more@a.example/b",
]
NO_URLS = ["", "a", "file:///etc/passwd", "http://", "http:///etc/passwd", "javascript:alert(1)"]
NO_URLS += ["http://a:0/", "http://a:99999/", "http://[", "http://\ud800/", "http://a\\@b/"]


@pytest.mark.parametrize("kind", LISTED)
def test_a_listed_url_is_asked_for_as_it_is_or_not_at_all(kind: str) -> None:
    path, reason = LISTED[kind]
    with RawServer() as server:
        (found,) = fetch([server.url(path)])
        assert found.reason == reason
        pages = [path for _, path in server.asked if path != "/robots.txt"]
        assert len(pages) == (not reason)


@pytest.mark.parametrize("line", [f'{{"uri": "http://me:{SECRET}@h/"}}', f'["{SECRET}"]', SECRET])
def test_a_line_without_url_is_not_quoted(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    with pytest.raises(DataError, match="has no URL") as refused:
        list(listed_urls(ByteRange(str(path), 0, len(line)), "a"))
    assert SECRET not in str(refused.value)


# --- servers --------------------------------------------------------------------------------------


def collect(given: Path | str, folder: Path, **options: Any) -> None:
    run_directly(
        CollectConfig,
        collect_run.run,
        **{"input": [str(given)], "output_dir": str(folder), "workers": 1, **options},
    )


@pytest.mark.slow
def test_hostile_lists_and_answers_become_documents_or_reasons(tmp_path: Path) -> None:
    with RawServer() as server:
        expected = {server.url(f"/{kind.replace(' ', '_')}"): ANSWERS[kind][2] for kind in ANSWERS}
        expected |= {server.url(path): reason for path, reason in LISTED.values()}
        urls = [*expected, *WITH_PASSWORD, *NO_URLS, server.url("/page")]
        write(tmp_path / "urls.jsonl", [{"url": url} for url in urls])
        options = {"allow_private_addresses": True, "max_document_bytes": 1 << 20, **QUICK}
        collect(tmp_path / "urls.jsonl", tmp_path / "pages", source="fetch", **options)
    lost = rows(tmp_path / "pages", "dropped")
    reasons = {row["url"]: row["dropped"]["rule"] for row in lost}
    assert {url: reasons.get(url, "") for url in expected} == expected
    assert len(lost) == sum(map(bool, expected.values())) + len(WITH_PASSWORD) + len(NO_URLS)
    assert {row["dropped"]["rule"] for row in lost[-len(NO_URLS) :]} == {"scheme"}
    for name in store.list_files(str(tmp_path / "pages")):
        data = (tmp_path / "pages" / name).read_bytes()
        data = gzip.decompress(data) if name.endswith(".gz") else data
        assert SECRET.encode() not in data, name
        assert b"X-Evil" not in data or not name.endswith(".gz")
    collect(
        f"{tmp_path}/pages/pages-*.warc.gz",
        tmp_path / "out",
        source="warc",
        max_document_bytes=1 << 20,
    )
    documents, dropped = rows(tmp_path / "out", "documents"), rows(tmp_path / "out", "dropped")
    assert len(documents) + len(dropped) == len(urls) - len(lost)
    assert documents[-1]["url"] == server.url("/page")
    bombs = {row["url"]: row["dropped"]["rule"] for row in dropped if "bomb_of" in row["url"]}
    assert list(bombs.values()) == ["too_large"] * 2
    assert "root:" not in json.dumps(documents)


ROBOTS: dict[str, tuple[bytes, bytes, str]] = {
    "lines without end": (OK + b"\r\n", b"User-agent: *\nDisallow: /private\n" * 99, ""),
    "a line without end": (OK + b"\r\n", b"x" * 9999, ""),
    "a rule without end": (OK + b"\r\nUser-agent: *\nDisallow: /", b"*a" * 9999, ""),
    "a circle": (FOUND + b"/robots.txt\r\n\r\n", b"", ""),
    "metadata": (FOUND + b"http://169.254.169.254/\r\n\r\n", b"", "address"),
    "a file": (FOUND + b"file:///etc/passwd\r\n\r\n", b"", "scheme"),
    "hints without end": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 99, "unreachable"),
    "a delay of a year": (
        OK + b"\r\nUser-agent: *\nCrawl-delay: 1e999\nCrawl-delay: nan\n",
        b"",
        "",
    ),
    "zeros": (OK + b"\r\n" + bytes(10_000), b"", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROBOTS)
def test_a_hostile_robots_holds_up_only_its_host(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANSWERS, "robots.txt", ROBOTS[kind])
    with RawServer() as server:
        began = time.monotonic()
        (found,) = fetch([server.url("/page")])
        assert found.reason == ROBOTS[kind][2]
        assert server.counts["/robots.txt"] <= 1 + LOCAL.max_redirects
        assert time.monotonic() - began < 20


@pytest.mark.slow
def test_a_host_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_TIMEOUTS", 3)
    config = FetchConfig(
        allow_private_addresses=True, host_delay_seconds=0.0, request_timeout_seconds=0.3
    )
    with BadServer() as server, BadServer() as other:
        urls = [server.url(f"/silent/{number}") for number in range(50)]
        *found, page = fetch([*urls, other.url("/page", "localhost")], config)
        asked = sum(server.counts[f"/silent/{number}"] for number in range(50))
    assert {one.reason for one in found} == {"unreachable"}
    assert "its host took too long 3 times; fetch it in another run" in {one.why for one in found}
    assert asked == 3
    assert page.reason == ""


def test_only_the_last_sites_are_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may answer any name: each site would be a megabyte."""
    monkeypatch.setattr(client, "MAX_SITES", 2)
    hosts = Hosts()
    for site in ("a", "b", "a", "c"):
        assert hosts.keep(site, ALLOW_ALL) is ALLOW_ALL
    assert list(hosts.robots) == ["b", "c"]
