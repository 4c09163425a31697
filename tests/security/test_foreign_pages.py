"""Dumps, crawls and web pages of others: none reads a file or a server, takes more memory or time
than the bounds, or ends the stage."""

from __future__ import annotations

import bz2
import gzip
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainyard.collection.sources.warcs import Warc, html
from trainyard.collection.sources import streams
from trainyard.collection.sources.charsets import CHARSETS, decode
from trainyard.collection.sources.html_files import html_documents
from trainyard.collection.sources.html_reader import HtmlReader
from trainyard.collection.sources.warc import warc_documents
from trainyard.collection.sources.wiki_dump import raw_pages, read_site
from trainyard.collection.sources.wikipedia import wiki_documents
from trainyard.corpus.formats.records import ByteRange
from trainyard.errors import DataError
from trainyard.testing.wiki_dump import HEAD, TAIL, Page

LIMIT = 1 << 20
MIB = 1 << 20

LAUGHS = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10 if i else "ha"}">' for i in range(10))
HEADS = {
    "a billion laughs": f"<!DOCTYPE mediawiki [{LAUGHS}]>" + HEAD.replace("Wikipedia", "&a9;"),
    "an external entity": '<!DOCTYPE m [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
    + HEAD.replace("Wikipedia", "&a;"),
    "an external document type": '<!DOCTYPE m SYSTEM "http://127.0.0.1:9/a.dtd">' + HEAD,
    "a parameter entity": '<!DOCTYPE m [<!ENTITY % a SYSTEM "file:///etc/passwd"> %a;]>' + HEAD,
    "an undefined entity": HEAD.replace("Wikipedia", "&a;"),
    "a head without end": HEAD.partition("</siteinfo>")[0] + "<a>" * MIB,
    "another encoding": HEAD.replace("Wikipedia", "\ud800"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_the_head_of_a_dump_declares_nothing(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.xml"
    path.write_bytes((HEADS[kind] + TAIL).encode("utf-8", "surrogatepass"))
    with pytest.raises(DataError, match=r"is not MediaWiki's|no <siteinfo>"):
        read_site(str(path), "", path.stat().st_size)


PAGES = {
    "an entity": "<page><title>&a9;</title><id>1</id></page>",
    "a document type": f"<page><!DOCTYPE a [{LAUGHS}]><title>A</title><id>1</id></page>",
    "a million elements": "<page>" + "<a>" * 200_000 + "</page>",
    "attributes": "<page><a " + " ".join(f"a{i}=''" for i in range(50_000)) + "/></page>",
    "a page in a page": "<page><title>A</title><page></page>",
    "no characters of XML": "<page><title>\x00</title></page>",
}


@pytest.mark.parametrize("kind", PAGES)
def test_a_hostile_page_is_dropped_and_the_next_is_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.xml"
    path.write_text(HEAD + PAGES[kind] + Page("B", "text").xml(2) + TAIL)
    size = path.stat().st_size
    site = read_site(str(path), "", size)
    source = ByteRange(str(path), 0, size)
    *hostile, last = wiki_documents(source, "", "a.xml", site, (0,), LIMIT)
    assert [one.reason for one in hostile] == ["bad_record"]
    assert last.fields["text"] == "text"


def test_wikitext_in_a_dump_reaches_no_other_page(tmp_path: Path) -> None:
    """Markup of XML that an author writes is escaped; a forged page stays text."""
    forged = Page("Forged", "x").xml(9)
    (tmp_path / "a.xml").write_text(HEAD + Page("A", f"a {forged}").xml(1) + TAIL)
    source = ByteRange(str(tmp_path / "a.xml"), 0, (tmp_path / "a.xml").stat().st_size)
    assert len(list(raw_pages(source, "", "a.xml", LIMIT))) == 1


def test_archives_that_expand_without_measure_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "FREE_BYTES", MIB)
    bomb = (HEAD + "<page><title>A</title><id>1</id>").encode() + bytes(3 * MIB)
    for name, data in (("a.xml.bz2", bz2.compress(bomb, 1)), ("b.bz2", bz2.compress(bomb))):
        (tmp_path / name).write_bytes(data)
        source = ByteRange(str(tmp_path / name), 0, len(data))
        with pytest.raises(DataError, match="expand more than 1000 times"):
            list(raw_pages(source, ".bz2", name, LIMIT))


@pytest.mark.slow
def test_damaged_archives_are_errors(tmp_path: Path) -> None:
    whole = bz2.compress((HEAD + Page("A", "a" * 5000).xml(1) + TAIL).encode())
    for place in range(4, len(whole), max(1, len(whole) // 40)):
        data = bytearray(whole)
        data[place] ^= 0x55
        (tmp_path / "a.bz2").write_bytes(data)
        with pytest.raises(DataError):
            list(raw_pages(ByteRange(str(tmp_path / "a.bz2"), 0, len(data)), ".bz2", "a", LIMIT))


# --- web pages --------------------------------------------------------------------------------

BODY = "<html><body>"
BODIES = {
    "deep": (BODY + "<div>" * 200_000 + "x").encode(),
    "deep emphasis": (BODY + "<b><i>" * 50_000 + "x").encode(),
    "deep tables": (BODY + "<table><tr><td>" * 20_000 + "x").encode(),
    "attributes": (BODY + "<p " + " ".join(f"a{i}=1" for i in range(100_000)) + ">x").encode(),
    "paragraphs": (BODY + "<p>a</p>" * 100_000).encode(),
    "one long line": (BODY + "<p>" + "word " * 100_000).encode(),
    "entities": f"<!DOCTYPE a [{LAUGHS}]>{BODY}<p>{'&a9;' * 1000}".encode(),
    "an external entity": b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><p>&b;',
    "zeros": bytes(MIB),
    "an archive": gzip.compress(bytes(50 * MIB), 1),
    "half characters": b"\xed\xa0\x80" * 10_000,
    "scripts": (BODY + "<script>" * 50_000).encode(),
    "comments": (BODY + "<!--" * 100_000).encode(),
    "forms": (BODY + "<form><select><option>" * 20_000).encode(),
}


@pytest.fixture(scope="module")
def reader() -> Iterator[HtmlReader]:
    made = HtmlReader(2.0)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", BODIES)
def test_a_hostile_page_ends_at_most_its_reader(kind: str, reader: HtmlReader) -> None:
    began = time.process_time()
    found = reader.read(BODIES[kind], "")
    assert time.process_time() - began < 2  # of this process; the reader has its own bound
    assert "root:" not in found.text
    assert len(found.text) < 2 * MIB
    after = reader.read(html("A", "A page").encode(), "")
    assert (after.title, after.error, after.is_late) == ("A", "", False)
    assert "A page, paragraph 3," in after.text


@pytest.mark.slow
def test_a_page_that_takes_too_long_is_dropped(tmp_path: Path) -> None:
    reader = HtmlReader(0.2)
    path = tmp_path / "a.html"
    path.write_bytes(BODIES["paragraphs"] * 4)
    source = ByteRange(str(path), 0, path.stat().st_size)
    (found,) = html_documents(source, "", "a.html", reader, 8 * MIB)
    assert found.reason == "too_slow"
    reader.close()


@pytest.mark.slow
def test_a_reader_has_no_files_no_network_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    reader = HtmlReader(5.0)
    reader.read(b"", "")
    process = reader._process
    assert process is not None
    environ = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"secret" not in environ
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    files = next(line for line in limits.splitlines() if line.startswith("Max open files"))
    assert files.split()[3] == "3"
    assert len(os.listdir(f"/proc/{process.pid}/fd")) == 3
    reader.close()


@pytest.mark.slow
def test_a_reader_that_crashes_is_replaced(tmp_path: Path, reader: HtmlReader) -> None:
    warc = Warc(tmp_path / "a.warc.gz")
    for number in range(2):
        warc.response(f"https://a/{number}", html("A", "Words").encode())
    warc.close()
    size = (tmp_path / "a.warc.gz").stat().st_size
    source = ByteRange(str(tmp_path / "a.warc.gz"), 0, size)
    reader.read(b"", "")
    assert reader._process is not None
    reader._process.kill()
    found = list(warc_documents(source, ".gz", "a", reader, LIMIT))
    assert [one.reason for one in found] == ["unreadable", ""]


def test_a_page_names_only_charsets_that_decode_text() -> None:
    assert not {"zip", "bz2", "rot13", "idna", "punycode", "unicode_escape", "hex"} & CHARSETS
    assert decode("caf\u00e9".encode("latin-1"), "unicode_escape") == "caf\u00e9"
    page = b'<meta charset="koi8-r">' + "\u0434\u0430".encode("koi8-r")
    assert decode(page, "").endswith("\u0434\u0430")
