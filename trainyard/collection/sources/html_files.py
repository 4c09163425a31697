"""Documents from HTML files: the main text of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from trainyard.collection.documents import Place
from trainyard.collection.sources.found import BAD_RECORD, Found
from trainyard.collection.sources.html_reader import HtmlReader
from trainyard.collection.sources.warc import PAGE_REASONS, page_document
from trainyard.corpus.formats.compression import BrokenError, contents
from trainyard.corpus.formats.records import ByteRange

REASONS = (*PAGE_REASONS, BAD_RECORD)


def html_documents(
    source: ByteRange, compression: str, name: str, reader: HtmlReader, max_bytes: int
) -> Iterator[Found]:
    """The one document of a file. name: of the file; it is the id of the document too."""
    place, fields = Place(name, 0, source.size_bytes), {"id": name}
    body = bytearray()
    try:
        with closing(contents(source.url, compression)) as found:
            for piece in found:
                body += piece
                if len(body) > max_bytes:
                    break
    except BrokenError as error:
        yield Found(place, fields, BAD_RECORD, str(error))
        return
    yield page_document(place, fields, bytes(body), "", reader, max_bytes)
