"""WARC and WET files: each record once from any ranges, and the reason of each that is no page."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.trainyard.collection.sources.warcs import DATE, Warc, html
from trainyard.collection.sources import streams
from trainyard.collection.sources.found import Found
from trainyard.collection.sources.html_reader import HtmlReader
from trainyard.collection.sources.warc import raw_records, warc_documents
from trainyard.corpus.formats.records import ByteRange
from trainyard.errors import DataError

LIMIT = 1 << 20


@pytest.fixture(scope="module")
def reader() -> Iterator[HtmlReader]:
    made = HtmlReader(30.0)
    yield made
    made.close()


def documents(path: Path, reader: HtmlReader, max_bytes: int = LIMIT) -> list[Found]:
    compression = ".gz" if path.suffix == ".gz" else ""
    source = ByteRange(str(path), 0, path.stat().st_size)
    return list(warc_documents(source, compression, path.name, reader, max_bytes))


def chunked(data: bytes) -> bytes:
    parts = [data[at : at + 100] for at in range(0, len(data), 100)]
    return b"".join(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in parts) + b"0\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["crawl.warc.gz", "crawl.warc"])
def test_each_record_is_a_document_or_has_its_reason(
    name: str, tmp_path: Path, reader: HtmlReader
) -> None:
    warc = Warc(tmp_path / name, gzip=name.endswith("gz"))
    page = html("Oslo", "The caf\u00e9 of Oslo")
    kinds = {"Content-Type": "text/html; charset=ISO-8859-1"}
    packed = {**kinds, "Content-Encoding": "gzip"}
    warc.record("warcinfo", "https://a/info", b"software: x\r\n")
    warc.response("https://a/utf8", page.encode())
    warc.response("https://a/latin", page.encode("latin-1"), kinds)
    warc.response("https://a/gzip", gzip.compress(page.encode("latin-1")), packed)
    headers = {**packed, "Transfer-Encoding": "chunked"}
    warc.response("https://a/chunks", chunked(gzip.compress(page.encode("latin-1"))), headers)
    warc.response("https://a/gone", b"", status="404 Not Found")
    warc.response("https://a/picture", b"\x89PNG", {"Content-Type": "image/png"})
    warc.response("https://a/none", page.encode(), {})
    warc.response("https://a/empty", b"<html><body></body></html>")
    warc.response("https://a/large", page.encode() * 2000)
    warc.response("https://a/bomb", gzip.compress(bytes(LIMIT + 1)), packed)
    warc.record("conversion", "https://a/wet", "Text of a caf\u00e9.".encode())
    warc.record("conversion", "https://a/blank", b" \n")
    warc.close()
    found = {
        one.fields["url"].rpartition("/")[2]: one for one in documents(tmp_path / name, reader)
    }
    reasons = {url: one.reason for url, one in found.items() if one.reason}
    assert reasons == {
        "info": "record_type",
        "gone": "status",
        "picture": "media_type",
        "none": "media_type",
        "empty": "empty",
        "large": "too_large",
        "bomb": "too_large",
        "blank": "empty",
    }
    for url in ("utf8", "latin", "gzip", "chunks"):
        fields = found[url].fields
        assert fields["title"] == "Oslo"
        assert "The caf\u00e9 of Oslo, paragraph 11," in fields["text"]
        assert "Imprint" not in fields["text"]
        assert fields["date"] == DATE
        assert fields["id"].startswith("urn:uuid:")
        assert fields["payload_digest"].startswith("sha1:")
    assert found["wet"].fields["text"] == "Text of a caf\u00e9."


def wet(path: Path, count: int) -> Path:
    warc = Warc(path)
    for number in range(count):
        warc.record("conversion", f"https://a/{number}", f"text {number} ".encode() * (number + 1))
    warc.close()
    return path


def test_any_ranges_give_each_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PIECE_BYTES", 200)
    path = wet(tmp_path / "a.wet.gz", 25)
    data, size = path.read_bytes(), path.stat().st_size
    for count in (1, 2, 7, 40):
        ranges = pairwise(size * i // count for i in range(count + 1))
        found = [
            one
            for a, b in ranges
            for one in raw_records(ByteRange(str(path), a, b), ".gz", "a", LIMIT)
        ]
        assert len(found) == 25
        for number, record in enumerate(found):
            assert f"text {number} ".encode() * (number + 1) in record.data
            member = zlib.decompressobj(31).decompress(data[record.place.offset :])
            assert member[: record.place.length] == record.data
            assert record.place.within == 0


def test_several_records_in_a_member_are_found(tmp_path: Path) -> None:
    plain = gzip.decompress(wet(tmp_path / "a.wet.gz", 5).read_bytes())
    (tmp_path / "b.wet.gz").write_bytes(gzip.compress(plain))
    source = ByteRange(str(tmp_path / "b.wet.gz"), 0, (tmp_path / "b.wet.gz").stat().st_size)
    found = list(raw_records(source, ".gz", "b", LIMIT))
    assert [plain[r.place.within : r.place.within + r.place.length] for r in found] == [
        record.data for record in found
    ]
    assert len(found) == 5


def test_a_record_beyond_the_limit_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PIECE_BYTES", 500)
    warc = Warc(tmp_path / "a.warc.gz")
    for body in (b"a", b"b" * 5000, b"c"):
        warc.record("conversion", f"https://a/{body[:1].decode()}", body)
    warc.close()
    found = documents(tmp_path / "a.warc.gz", HtmlReader(1.0), 2000)
    assert [one.reason for one in found] == ["", "too_large", ""]


HEAD = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: %s\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"hello\r\n\r\n", "no WARC record at byte 0"),
        (HEAD % b"-1" + b"a", "no WARC record"),
        (HEAD % b"99999999999999999999" + b"a", "no WARC record"),
        (b"WARC/1.0\r\nA: b\r\n\r\n", "no WARC record"),
        (b"WARC/1.0\r\n" + b"A: b\r\n" * 100_000, "no WARC record"),
        (b"WARC/1.0\r\nA: " + b"b" * 1_000_000, "no WARC record"),
        (HEAD % b"100" + b"a", "cut short"),
        (HEAD % b"999999999999999" + b"a", "cut short"),
        (HEAD % b"1" + b"a\r\n\r\nWARD/1.0", "no WARC record"),
    ],
)
def test_what_is_no_record_is_an_error(data: bytes, message: str, tmp_path: Path) -> None:
    for name, contents in (("a.warc", data), ("a.warc.gz", gzip.compress(data))):
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(DataError, match=message):
            documents(tmp_path / name, HtmlReader(1.0))
