"""Pages of a dump: the same from any ranges, in XML and bzip2, and nothing of a hostile one."""

from __future__ import annotations

import bz2
from itertools import pairwise
from pathlib import Path

import pytest

from trainyard.collection.sources import streams, wiki_dump
from trainyard.collection.sources.files import SourceSplitter, read_index
from trainyard.collection.sources.wiki_dump import PageError, RawPage, parse_page, raw_pages
from trainyard.corpus.formats.records import ByteRange
from trainyard.errors import DataError
from trainyard.testing.wiki_dump import HEAD, TAIL, Page, Plan, Planted, write_dump

LIMIT = 1 << 20
DUMP = Plan(articles=40, words=60, seed=3)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Planted]:
    """A dump as dump.xml, as multistream dump.xml.bz2 with its index, and as one stream."""
    folder = tmp_path_factory.mktemp("dump")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainyard.testing.wiki_dump.PAGES_A_STREAM", 7)
        planted = write_dump(folder / "dump.xml.bz2", DUMP, folder / "index.txt.bz2")
    xml = bz2.decompress((folder / "dump.xml.bz2").read_bytes())
    (folder / "dump.xml").write_bytes(xml)
    (folder / "one.xml.bz2").write_bytes(bz2.compress(xml))
    cut = [bz2.compress(xml[at : at + 997]) for at in range(0, len(xml), 997)]
    (folder / "pieces.xml.bz2").write_bytes(b"".join(cut))
    return folder, planted


def pages(path: Path, bounds: list[int]) -> list[RawPage]:
    compression = ".bz2" if path.suffix == ".bz2" else ""
    ranges = [ByteRange(str(path), a, b) for a, b in pairwise(bounds)]
    return [p for one in ranges for p in raw_pages(one, compression, path.name, LIMIT)]


@pytest.mark.parametrize("name", ["dump.xml", "dump.xml.bz2", "one.xml.bz2", "pieces.xml.bz2"])
def test_any_ranges_give_each_page_once(
    name: str, dump: tuple[Path, Planted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where streams end within a page and within its tags, and pieces are small."""
    monkeypatch.setattr(streams, "PIECE_BYTES", 700)
    path, planted = dump[0] / name, dump[1]
    size = path.stat().st_size
    whole = pages(path, [0, size])
    assert len(whole) == planted.pages
    for count in (2, 9, 50):
        assert pages(path, [size * i // count for i in range(count + 1)]) == whole
    texts = [page.data for page in whole]
    assert texts == [page.data for page in pages(dump[0] / "dump.xml", [0, planted.xml_bytes])]


def test_the_place_of_a_page_leads_to_its_bytes(dump: tuple[Path, Planted]) -> None:
    for name in ("dump.xml", "dump.xml.bz2"):
        data = (dump[0] / name).read_bytes()
        for page in pages(dump[0] / name, [0, len(data)]):
            start, contents = page.place.offset, data
            if page.place.within is not None:
                start = page.place.within
                contents = bz2.BZ2Decompressor().decompress(data[page.place.offset :])
            assert contents[start : start + page.place.length] == page.data


def test_units_are_cut_at_the_streams_of_the_index(dump: tuple[Path, Planted]) -> None:
    offsets, listed = read_index(str(dump[0] / "index.txt.bz2"))
    path = dump[0] / "dump.xml.bz2"
    size = path.stat().st_size
    assert listed == dump[1].pages
    ranges = SourceSplitter("wikipedia", {str(path): offsets})(str(path), size, size // 4)
    assert len(ranges) in (4, 5)
    assert {one.start for one in ranges} <= {0, *offsets}
    bounds = [*(one.start for one in ranges), size]
    assert pages(path, bounds) == pages(path, [0, size])
    with pytest.raises(DataError, match="give the index of this file"):
        SourceSplitter("wikipedia", {str(path): [size]})(str(path), size, size)


@pytest.mark.parametrize("line", ["x:1:A\n", "9:1:A\n8:2:B\n", "-1:1:A\n", "\n", "1" * 30 + ":1:A"])
def test_what_is_no_index_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "index.txt").write_text(f"1:1:Main\n{line}")
    with pytest.raises(DataError, match="is no line of an index"):
        read_index(str(tmp_path / "index.txt"))


def test_a_page_has_its_newest_revision() -> None:
    xml = Page("A & B", "[[x]] < y", 0).xml(12)
    first, second = xml.partition("<revision>")[0], xml.partition("<revision>")[2]
    older = "<revision><id>3</id><text>old</text></revision>\n<revision>"
    page = parse_page((first + older + second).strip().encode())
    assert (page.id, page.title, page.namespace) == ("12", "A & B", "0")
    assert (page.text, page.revision, page.redirect) == ("[[x]] < y", "10012", None)
    assert parse_page(Page("C", "", 0, "A & B").xml(3).strip().encode()).redirect == "A & B"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x {{disambiguation}}", True),
        ("{{Disambiguation|geo}}", True),
        ("{{Human name disambiguation}}", True),
        ("{{hndis|Smith, John}}", True),
        ("{{dab}}", True),
        ("{{Begriffskl\u00e4rung}}", True),
        ("__DISAMBIG__", True),
        ("a [[b]]{{disambiguation needed|date=May}}", False),
        ("{{about|x|other uses|x (disambiguation)}}", False),
        ("{{dabble}} the disambiguation", False),
    ],
)
def test_disambiguations_are_known_by_their_template(text: str, expected: bool) -> None:
    assert wiki_dump.WikiPage(text=text).is_disambiguation is expected


def test_a_page_beyond_the_limit_is_reported_and_passed_over(tmp_path: Path) -> None:
    many = [Page("A", "a").xml(1), Page("B", "b" * 5000).xml(2), Page("C", "c").xml(3)]
    (tmp_path / "d.xml").write_text(HEAD + "".join(many) + TAIL)
    source = ByteRange(str(tmp_path / "d.xml"), 0, (tmp_path / "d.xml").stat().st_size)
    with pytest.MonkeyPatch.context() as patch:
        for piece_bytes in (300, 1 << 20):
            patch.setattr("trainyard.corpus.formats.compression.PIECE_BYTES", piece_bytes)
            found = list(raw_pages(source, "", "d.xml", 2000))
            assert [page.is_whole for page in found] == [True, False, True]
            assert [parse_page(found[i].data).title for i in (0, 2)] == ["A", "C"]


def test_the_site_gives_addresses_and_names_of_namespaces(dump: tuple[Path, Planted]) -> None:
    path = dump[0] / "dump.xml"
    site = wiki_dump.read_site(str(path), "", path.stat().st_size)
    assert site.page_url("A b/\u00e4?") == "https://example.org/wiki/A_b/%C3%A4%3F"
    german = HEAD.replace(">File<", ">Datei<").replace(">Category<", ">Kategorie<")
    (dump[0] / "german.xml").write_text(german)
    site = wiki_dump.read_site(str(dump[0] / "german.xml"), "", len(german))
    assert {"datei", "kategorie", "file", "category"} <= site.prefixes


def test_a_dump_that_was_cut_short_is_an_error(dump: tuple[Path, Planted]) -> None:
    for name in ("dump.xml", "dump.xml.bz2"):
        data = (dump[0] / name).read_bytes()
        short = dump[0] / f"short-{name}"
        short.write_bytes(data[: len(data) * 2 // 3])
        with pytest.raises(DataError, match="cut short"):
            pages(short, [0, len(data) * 2 // 3])


@pytest.mark.parametrize(
    "xml",
    [
        "<page><title>A</title><id>1</id>&bomb;</page>",
        "<page><title>A</title><id>x</id></page>",
        "<page><id>1</id></page>",
        "<page><title>A</title><id>1</id><text>a</page>",
        '<page><!DOCTYPE a [<!ENTITY b "c">]><title>A</title><id>1</id></page>',
        "<page><title>\x01</title><id>1</id></page>",
        "<page>" + "<a>" * 1000 + "</a>" * 1000 + "</page>",
    ],
)
def test_what_is_no_page_is_refused(xml: str) -> None:
    with pytest.raises(PageError):
        parse_page(xml.encode())
