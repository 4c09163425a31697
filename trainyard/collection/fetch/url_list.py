"""URLs of lists, by byte range: a line belongs to the range in which it begins.

A line of .txt is a URL; one of .jsonl, such as a page that a run did not get, has it as `url`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from trainyard import json_text
from trainyard.collection.documents import Place
from trainyard.corpus.formats.compression import contents
from trainyard.corpus.formats.records import ByteRange
from trainyard.errors import DataError

MAX_LINE_BYTES = 1 << 20


class ListedUrl(NamedTuple):
    """A URL, and its line."""

    place: Place
    url: str


def listed_urls(source: ByteRange, name: str) -> Iterator[ListedUrl]:
    """The URLs of a range; blank lines are none. name: of the file, for places. DataError for a
    line that has none."""
    is_json = source.url.endswith(".jsonl")
    for offset, line in _lines(source):
        if not (stripped := line.strip()):
            continue
        try:
            url = json_text.loads(stripped)["url"] if is_json else stripped.decode()
        except (ValueError, KeyError, TypeError) as error:
            rule = "be an object with a string `url`" if is_json else "be a URL in UTF-8"
            raise DataError(
                f"{source.url}: the line at byte {offset} has no URL; it must {rule}"
            ) from error
        if not isinstance(url, str):
            raise DataError(f"{source.url}: the `url` of the line at byte {offset} is no string")
        yield ListedUrl(Place(name, offset, len(line)), url)


def _lines(source: ByteRange) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in a range, with their places, without line feeds."""
    start = max(0, source.start - 1)  # a line begins where the byte before it is a line feed
    data, at = b"", start
    is_first = source.start > 0
    with closing(contents(source.url, "", start, source.end)) as found:
        for piece in found:
            *lines, data = (data + piece).split(b"\n")
            for line in lines:
                if not is_first:
                    if at >= source.end:
                        return
                    yield at, line
                is_first = False
                at += len(line) + 1
            if len(data) > MAX_LINE_BYTES:
                raise DataError(f"{source.url}: the line at byte {at} is no URL: it is too long")
    if data and not is_first and at < source.end:
        yield at, data
