"""Documents from WARC and WET files: the main text of HTML pages, and text that others extracted.

Gzip members stand alone, so that readers share a file by ranges; memory is bounded by the largest
record that is looked at. Records and their HTTP messages are parsed by warcio. Format: ISO 28500,
WARC/1.1."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

from warcio.exceptions import ArchiveLoadFailed
from warcio.recordloader import ArcWarcRecordLoader
from warcio.statusandheaders import StatusAndHeadersParserException

from trainyard.collection.documents import Place
from trainyard.collection.sources.found import BAD_RECORD, EMPTY, TEXT, TOO_LARGE, Found
from trainyard.collection.sources.html_reader import HtmlReader
from trainyard.collection.sources.streams import Piece, PlacedBytes, pieces
from trainyard.corpus.formats.records import ByteRange
from trainyard.errors import DataError

RECORD_TYPE, STATUS, MEDIA_TYPE = "record_type", "status", "media_type"
TOO_SLOW, UNREADABLE = "too_slow", "unreadable"

PAGE_REASONS = (EMPTY, TOO_LARGE, TOO_SLOW, UNREADABLE)
REASONS = (RECORD_TYPE, STATUS, MEDIA_TYPE, *PAGE_REASONS, BAD_RECORD)

BEGIN = b"WARC/"
HEAD_END = b"\r\n\r\n"
HEAD_BYTES = 1 << 16
"""Longest head of a record."""
LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,18})[ \t]*\r\n", re.IGNORECASE)
CHARSET = re.compile(r"charset=[\"']?([\w.:-]{1,40})", re.ASCII | re.IGNORECASE)

PAGES = ("response", "resource")
HTML_TYPES = ("text/html", "application/xhtml+xml")
WITH_TEXT = "conversion"
"""The type of the records of a WET file."""

FIELDS = {"WARC-Record-ID": "id", "WARC-Target-URI": "url", "WARC-Date": "date"}
FIELDS |= {"WARC-Payload-Digest": "payload_digest", "WARC-Listed-URI": "listed_url"}


class RawRecord(NamedTuple):
    """A record as it stands in the file."""

    place: Place
    data: bytes
    """Its head and its block; of a record that is too large, the head alone."""
    is_whole: bool


def raw_records(
    source: ByteRange, compression: str, name: str, max_bytes: int
) -> Iterator[RawRecord]:
    """The records that begin in a range. name: of the file, for their places.

    DataError for a file that is not WARC, or was cut short."""
    placed = PlacedBytes(source, bool(compression), name)
    with closing(pieces(source, compression, lambda data: data.startswith(BEGIN))) as found:
        while _to_record(placed, found):
            if not placed.is_mine(placed.at):
                return
            head_bytes, total = _sizes(placed, found, source.url)
            place = placed.place(total)
            is_whole = total <= max_bytes
            wanted = total if is_whole else head_bytes
            data = placed.data[placed.at : placed.at + wanted]
            if is_whole and len(data) < total:
                _fill(placed, found, total)
                data = placed.data[placed.at : placed.at + total]
            if not _skip(placed, found, total):
                raise DataError(f"{source.url}: the last record was cut short; fetch it again")
            yield RawRecord(place, data, is_whole)


def _fill(placed: PlacedBytes, found: Iterator[Piece], wanted: int) -> bool:
    """Read until this many bytes are there; False at the end of the file."""
    while placed.left < wanted:
        piece = next(found, None)
        if piece is None:
            return False
        placed.add(piece)
    return True


def _skip(placed: PlacedBytes, found: Iterator[Piece], count: int) -> bool:
    """Be done with this many bytes, keeping none; False if the file ends before."""
    while placed.left < count:
        count -= placed.left
        placed.at = len(placed.data)
        piece = next(found, None)
        if piece is None:
            return False
        placed.add(piece)
    placed.at += count
    return True


def _to_record(placed: PlacedBytes, found: Iterator[Piece]) -> bool:
    """Pass over the blank lines before a record; False at the end of the file."""
    while True:
        rest = placed.data[placed.at : placed.at + HEAD_BYTES]
        placed.at += len(rest) - len(rest.lstrip(b"\r\n"))
        if placed.left:
            return True
        if not _fill(placed, found, 1):
            return False


def _sizes(placed: PlacedBytes, found: Iterator[Piece], url: str) -> tuple[int, int]:
    """Bytes of the head of a record, and of the whole."""
    _fill(placed, found, len(BEGIN))
    end = placed.data.find(HEAD_END, placed.at)
    while end < 0 and placed.left <= HEAD_BYTES and _fill(placed, found, placed.left + 1):
        end = placed.data.find(HEAD_END, placed.at)
    head = placed.data[placed.at : end + len(HEAD_END)]
    length = LENGTH.search(head) if end >= 0 else None
    if length is None or not head.startswith(BEGIN) or len(head) > HEAD_BYTES:
        where = placed.place(0)
        raise DataError(
            f"{url}: no WARC record at byte {where.offset}"
            f"{'' if where.within is None else f'+{where.within}'}, where one should begin"
        )
    return len(head), len(head) + int(length[1])


# --- documents --------------------------------------------------------------------------------


def warc_documents(
    source: ByteRange, compression: str, name: str, reader: HtmlReader, max_bytes: int
) -> Iterator[Found]:
    """The records of a range as documents."""
    for record in raw_records(source, compression, name, max_bytes):
        try:
            yield _found(record, reader, max_bytes)
        except (ArchiveLoadFailed, StatusAndHeadersParserException, EOFError, ValueError) as error:
            why = " ".join(str(error).split())[:200]
            yield Found(record.place, {}, BAD_RECORD, why)


def _found(raw: RawRecord, reader: HtmlReader, max_bytes: int) -> Found:
    record = ArcWarcRecordLoader().parse_record_stream(
        io.BytesIO(raw.data), known_format="warc", no_record_parse=not raw.is_whole
    )
    headers = record.rec_headers
    given = {key: headers.get_header(name) for name, key in FIELDS.items()}
    fields = {key: value.strip("<>") for key, value in given.items() if value}
    if record.rec_type not in (*PAGES, WITH_TEXT):
        return Found(raw.place, fields, RECORD_TYPE, f"a record of type {record.rec_type[:40]}")
    if not raw.is_whole:
        return Found(raw.place, fields, TOO_LARGE, f"the record has more than {max_bytes} bytes")
    if record.rec_type == WITH_TEXT:
        text = record.raw_stream.read().decode("utf-8", "replace").strip()
        if not text:
            return Found(raw.place, fields, EMPTY, "the record has no text")
        return Found(raw.place, {**fields, TEXT: text})
    return _page(raw.place, fields, record, reader, max_bytes)


def _page(
    place: Place, fields: dict[str, Any], record: Any, reader: HtmlReader, max_bytes: int
) -> Found:
    media_type = record.rec_headers.get_header("Content-Type") or ""
    if record.http_headers is not None:
        status = record.http_headers.get_statuscode()
        if status != "200":
            return Found(place, fields, STATUS, f"status {status[:40]}")
        media_type = record.http_headers.get_header("Content-Type") or ""
    if media_type.partition(";")[0].strip().lower() not in HTML_TYPES:
        return Found(place, fields, MEDIA_TYPE, f"media type {media_type[:80] or 'is not given'}")
    body = record.content_stream().read(max_bytes + 1)
    charset = CHARSET.search(media_type)
    return page_document(place, fields, body, charset[1] if charset else "", reader, max_bytes)


def page_document(
    place: Place,
    fields: dict[str, Any],
    body: bytes,
    charset: str,
    reader: HtmlReader,
    max_bytes: int,
) -> Found:
    """An HTML page as a document. charset: that of its header; empty if it names none."""
    if len(body) > max_bytes:
        return Found(place, fields, TOO_LARGE, f"the page has more than {max_bytes} bytes")
    found = reader.read(body, charset)
    if found.is_late:
        return Found(place, fields, TOO_SLOW, "its text takes longer than --html-timeout-seconds")
    if found.error:
        return Found(place, fields, UNREADABLE, found.error)
    fields = {**fields, "title": found.title} if found.title else fields
    if not found.text:
        return Found(place, fields, EMPTY, "Trafilatura finds no text")
    return Found(place, {**fields, TEXT: found.text})
