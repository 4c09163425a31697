"""Pages of a MediaWiki XML dump, by byte range.

A page belongs to the range in which `<page>` stands (compressed: in a stream that begins there), so
that any number of readers share a dump. Each page is parsed alone, by expat: no document type, and
so no entity of its own, can be within one. Format: MediaWiki's export-0.11.xsd."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote
from xml.parsers import expat

from trainyard.collection.documents import Place
from trainyard.collection.sources.streams import PlacedBytes, pieces
from trainyard.collection.sources.wikitext import PREFIXES
from trainyard.corpus.formats.records import ByteRange
from trainyard.errors import DataError

FILES, CATEGORIES = "6", "14"
"""Keys of namespaces, the same in every wiki."""
HEAD_BYTES = 1 << 20
"""The most that precedes the end of `siteinfo`."""
MAX_DEPTH = 20
"""Of elements in a page; MediaWiki's have five."""
SHOWN_BYTES = 4096
"""Of a page that is too large."""
BEGIN, END = b"<page>", b"</page>"

DISAMBIGUATION = re.compile(
    r"\{\{[ \n]{0,9}(?:[a-z /-]{0,40}disambig(?!uation needed)|(?:template:)?(?:(?:dab|hndis|geodis"
    r"|roaddis|schooldis|numberdis|mathdab|mil-unit-dis|callsigndis|aimai) *[|}]"
    r"|begriffskl\u00e4rung|homonymie|desambigua(?:ci\u00f3n|\u00e7\u00e3o)|ujednoznacznienie"
    r"|doorverwijspagina|\u043d\u0435\u043e\u0434\u043d\u043e\u0437\u043d\u0430"
    r"|\u66d6\u6627\u3055\u56de\u907f|\u6d88\u6b67[\u4e49\u7fa9]))",
    re.IGNORECASE,
)
"""Templates of disambiguation pages: English ones, and by name those of ten other Wikipedias."""
DISAMBIGUATION_SWITCH = "__DISAMBIG__"


@dataclass(frozen=True, slots=True)
class Site:
    """What the head of a dump says about its wiki."""

    url: str
    """Of pages, before their titles."""
    prefixes: frozenset[str]
    """Names of the namespaces of files and categories, lower case."""

    def page_url(self, title: str) -> str:
        """The address of a page."""
        return self.url + quote(title.replace(" ", "_"), safe="/:@!$*(),;~")


class RawPage(NamedTuple):
    """A page as it stands in the dump."""

    place: Place
    data: bytes
    """From `<page>` to `</page>`; of a page that is too large, its beginning."""
    is_whole: bool = True


@dataclass(slots=True)
class WikiPage:
    """A page, and its newest revision."""

    id: str = ""
    title: str = ""
    namespace: str = "0"
    redirect: str | None = None
    """The title that it leads to."""
    revision: str = ""
    timestamp: str = ""
    text: str = ""

    @property
    def is_disambiguation(self) -> bool:
        """Whether it only lists the meanings of a name."""
        return DISAMBIGUATION_SWITCH in self.text or DISAMBIGUATION.search(self.text) is not None


PAGE_FIELDS = {"title": "title", "ns": "namespace", "id": "id"}
REVISION_FIELDS = {"id": "revision", "timestamp": "timestamp", "text": "text"}
"""What a page has of its elements, and those of its newest revision."""


class PageError(Exception):
    """A page that is not one of MediaWiki's."""


# --- the head ---------------------------------------------------------------------------------


def read_site(url: str, compression: str, size_bytes: int) -> Site:
    """The head of a dump; DataError if it is none, or has a document type."""
    data = b""
    with closing(pieces(ByteRange(url, 0, size_bytes), compression)) as found:
        for piece in found:
            data += piece.data
            if b"</siteinfo>" in data or len(data) > HEAD_BYTES:
                break
    head, end, _ = data.partition(b"</siteinfo>")
    if not end or b"<mediawiki" not in head:
        raise DataError(f"{url}: no <siteinfo> in its first bytes: it is no MediaWiki XML dump")
    parser = expat.ParserCreate("utf-8")
    found_site = _SiteHandlers(parser)
    try:
        parser.Parse(head + end, False)
    except (expat.ExpatError, PageError) as error:
        raise DataError(f"{url}: the head of the dump is not MediaWiki's: {error}") from error
    return Site(found_site.base.rpartition("/")[0] + "/", PREFIXES | found_site.names)


class _SiteHandlers:
    def __init__(self, parser: expat.XMLParserType) -> None:
        self.base = ""
        self.names: set[str] = set()
        self._element, self._key = "", ""
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = self._refuse
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text

    def _refuse(self, name: str, *_: object) -> None:
        raise PageError(f"it declares a document type, {name[:40]}, which no dump has")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._element, self._key = name, attributes.get("key", "")

    def _end(self, _: str) -> None:
        self._element = ""

    def _text(self, text: str) -> None:
        if self._element == "base":
            self.base = text.strip()
        elif self._element == "namespace" and self._key in (FILES, CATEGORIES):
            self.names.add(text.strip().lower())


# --- pages ------------------------------------------------------------------------------------


def raw_pages(source: ByteRange, compression: str, name: str, max_bytes: int) -> Iterator[RawPage]:
    """The pages of a range. name: of the file, for their places."""
    placed = PlacedBytes(source, bool(compression), name)
    is_skipping = False
    with closing(pieces(source, compression)) as found:
        for piece in found:
            placed.add(piece)
            if is_skipping and not _find(placed, END):
                if placed.is_mine(len(placed.data)):
                    continue
                return
            is_skipping = False
            while _find(placed, BEGIN):
                if not placed.is_mine(placed.at):
                    return
                end = placed.data.find(END, placed.at)
                if end < 0:
                    break
                end += len(END)
                data = placed.data[placed.at : end]
                yield RawPage(placed.place(len(data)), data, len(data) <= max_bytes)
                placed.at = end
            if not _in_page(placed):
                if not placed.is_mine(len(placed.data)):
                    return
            elif placed.left > max_bytes:
                data = placed.data[placed.at : placed.at + SHOWN_BYTES]
                yield RawPage(placed.place(placed.left), data, is_whole=False)
                is_skipping = True
    if _in_page(placed) and not is_skipping:
        raise DataError(
            f"{source.url}: the last page has no {END.decode()}: the dump was cut short"
        )


def _find(placed: PlacedBytes, mark: bytes) -> bool:
    """Go to a mark; without one, to what may be its beginning."""
    at = placed.data.find(mark, placed.at)
    placed.at = at if at >= 0 else max(placed.at, len(placed.data) - len(mark) + 1)
    return at >= 0


def _in_page(placed: PlacedBytes) -> bool:
    return placed.data.startswith(BEGIN, placed.at)


def parse_page(data: bytes) -> WikiPage:
    """A page from its XML; PageError if it is not one."""
    parser = expat.ParserCreate("utf-8")
    handlers = _PageHandlers(parser)
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise PageError(f"its XML is broken: {error}") from error
    page = handlers.page
    if not page.id.isdecimal() or not page.title:
        raise PageError("it has no title or no id")
    return page


class _PageHandlers:
    """Takes what is wanted of a page. Of several revisions the last counts, which is the newest."""

    def __init__(self, parser: expat.XMLParserType) -> None:
        self.page = WikiPage()
        self._path: list[str] = []
        self._field: str | None = None
        self._texts: list[str] = []
        parser.buffer_text = True
        parser.buffer_size = 1 << 16
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        path = self._path
        if path == ["page"]:
            self._field = PAGE_FIELDS.get(name)
            if name == "redirect":
                self.page.redirect = attributes.get("title", "")
        elif path == ["page", "revision"]:
            self._field = REVISION_FIELDS.get(name)
        else:
            self._field = None
        self._texts = []
        path.append(name)
        if len(path) > MAX_DEPTH:
            raise PageError(f"its elements are more than {MAX_DEPTH} deep")

    def _end(self, _: str) -> None:
        self._path.pop()
        if self._field is not None:
            setattr(self.page, self._field, "".join(self._texts))
            self._field = None

    def _text(self, text: str) -> None:
        if self._field is not None:
            self._texts.append(text)
