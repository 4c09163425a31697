"""Rules for URLs: upstream's, by hand; and those of robots.txt, with the examples of RFC 9309."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from trainyard.collection.fetch.robots import MAX_DELAY_SECONDS, Rule, parse_robots
from trainyard.collection.fetch.url_list import listed_urls
from trainyard.collection.fetch.url_rules import DOMAINS, SUFFIXES, why_not
from trainyard.corpus.formats.records import ByteRange
from trainyard.errors import DataError

URLS = {
    "https://www.bbc.co.uk/news/1": "",
    "http://example.org": "",
    "http://example.org?a=b": "",
    "HTTP://EXAMPLE.org:8080/a": "",
    "http://1.2.3.4/a": "",
    "http://a_b.example.org/": "malformed_url",
    "http://example.org:/": "malformed_url",
    "http://example.org/a b": "malformed_url",
    "http://localhost/abc": "malformed_url",
    "http://-a.example.org/": "malformed_url",
    "ftp://example.org/a": "malformed_url",
    "http://user@example.org/": "malformed_url",
    "http://a.b": "malformed_url",
    "http://example.org?": "malformed_url",
    "a.org/b": "short_url",
    "https://old.reddit.com/r/a": "blacklisted_domain",
    "https://google.co.uk/": "blacklisted_domain",
    "https://github.com/a.py": "blacklisted_domain",
    "https://reddit.example.org/": "",
    "https://example.org/a.PDF?b=c": "blacklisted_suffix",
    "https://example.org/a?b=c.pdf": "",
    "https://example.org/a.7z": "blacklisted_suffix",
    "https://example.org/a.ai": "blacklisted_suffix",
    "https://example.org/a.tar.gz": "blacklisted_suffix",
}


@pytest.mark.parametrize("url", URLS)
def test_urls_by_hand(url: str) -> None:
    found = why_not(url)
    assert ("" if found is None else found[0]) == URLS[url]


def test_the_lists_are_as_long_as_upstreams() -> None:
    assert (len(DOMAINS), len(SUFFIXES)) == (110, 67)  # 66 there, where a comma is missing


ROBOTS = b"""
user-agent: foobot
Allow: /
Disallow: /nope$   # a comment
Crawl-delay: 2.5

User-Agent: *
User-Agent: second
Disallow: *.gif$
Disallow: /example/
Allow: /publications/
Disallow: /foo/bar/%62
Disallow: /\xc3\xa4
Crawl-delay: 1e9

User-agent: foobot
Disallow: /late
"""


@pytest.mark.parametrize(
    ("agent", "path", "expected"),
    [
        ("foobot/2.0", "/example/a", True),
        ("foobot/2.0", "/late/a", False),
        ("foobot", "/nope", False),
        ("foobot", "/nope/not", True),
        ("other", "/example/a", False),
        ("second", "/example/a", False),
        ("other", "/a.gif", False),
        ("other", "/a.gif?b", True),
        ("other", "/publications/a.gif", True),
        ("other", "/%C3%A4x", False),
        ("other", "/%c3%a4x", False),
        ("other", "/", True),
        ("foo", "/late/a", True),
    ],
)
def test_robots_by_hand(agent: str, path: str, expected: bool) -> None:
    robots = parse_robots(ROBOTS, agent)
    assert robots.allows(f"https://example.org{path}") is expected


def test_the_delay_is_that_of_the_group_and_has_a_limit() -> None:
    assert parse_robots(ROBOTS, "foobot").delay_seconds == 2.5
    assert parse_robots(ROBOTS, "other").delay_seconds == 0.0
    asked = parse_robots(b"User-agent: *\nCrawl-delay: 86400\n", "a")
    assert asked.delay_seconds == MAX_DELAY_SECONDS


@pytest.mark.parametrize(
    "text",
    [b"", b"\x00\xff" * 1000, b"disallow: /", b":" * 100_000, b"User-agent: *\n" * 40_000],
)
def test_what_is_no_robots_allows_all(text: bytes) -> None:
    assert parse_robots(text, "a").allows("https://example.org/a")


@pytest.mark.slow
def test_hostile_patterns_take_no_time() -> None:
    began = time.process_time()
    assert not Rule("/" + "*a" * 200 + "*b", False).matches("/" + "a" * 4000)
    robots = parse_robots(b"User-agent: *\n" + b"Disallow: /*a*a*a*a*b$\n" * 20_000, "x")
    assert robots.allows("https://example.org/" + "a" * 2000)
    assert time.process_time() - began < 2


def test_a_line_belongs_to_the_range_in_which_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    urls = [f"https://example.org/{'x' * (number % 7)}" for number in range(30)]
    path.write_text("\n".join(urls) + "\n\n\r\nhttps://example.org/last")
    size = path.stat().st_size
    for count in (1, 2, 5, 60):
        found = [
            one
            for i in range(count)
            for one in listed_urls(
                ByteRange(str(path), size * i // count, size * (i + 1) // count), "a"
            )
        ]
        assert [one.url for one in found] == [*urls, "https://example.org/last"]
    data = path.read_bytes()
    for one in found:
        line = data[one.place.offset : one.place.offset + one.place.length]
        assert line.decode().strip() == one.url


@pytest.mark.parametrize("line", ["{", "[]", '{"a": 1}', '{"url": 1}'])
def test_a_line_without_url_is_an_error(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"url": "https://a.b/c"}}\n{line}\n')
    with pytest.raises(DataError, match="at byte 25"):
        list(listed_urls(ByteRange(str(path), 0, path.stat().st_size), "a"))
