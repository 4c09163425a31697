"""Writes fetched pages as WARC records, in the order of their URLs: ISO 28500, WARC/1.1.

A record has no time and no number of its own making: its date is that of the server's answer, and
its id follows from the URL."""

from __future__ import annotations

import io
import uuid
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from trainyard.collection.fetch.client import Answer


class PageWriter:
    """Writes the pages of a batch to a file."""

    def __init__(self, file: Any) -> None:
        self._writer = WARCWriter(file, gzip=True, warc_version="1.1")

    def write(self, listed_url: str, answer: Answer) -> None:
        """Add a page. listed_url: that of the list, which may have led to the page by redirects."""
        headers = {
            "WARC-Record-ID": f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, listed_url)}>",
            "WARC-Date": answer_date(answer),
        }
        if listed_url != answer.url:
            headers["WARC-Listed-URI"] = listed_url
        http = StatusAndHeaders(answer.status, list(answer.headers), protocol="HTTP/1.1")
        record = self._writer.create_warc_record(
            answer.url,
            "response",
            payload=io.BytesIO(answer.body),
            http_headers=http,
            warc_headers_dict=headers,
        )
        self._writer.write_record(record)


def answer_date(answer: Answer) -> str:
    """When the server answered, by its own clock; by ours if it names no time."""
    for name, value in answer.headers:
        if name.lower() == "date":
            try:
                return _spelled(parsedate_to_datetime(value))
            except (ValueError, OverflowError):
                break
    return _spelled(datetime.now(UTC))


def _spelled(time: datetime) -> str:
    known = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return known.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
