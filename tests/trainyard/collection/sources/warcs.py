"""WARC files for tests, written by warcio."""

from __future__ import annotations

import io
from pathlib import Path

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

DATE = "2026-11-01T00:00:00Z"


def html(title: str, words: str, count: int = 12) -> str:
    """A page whose main text is `count` paragraphs with these words."""
    paragraphs = "".join(
        f"<p>{words}, paragraph {i}, has enough words not to be taken for a menu.</p>"
        for i in range(count)
    )
    return (
        f"<html><head><title>{title}</title></head><body><nav><a href='/'>Home</a></nav>"
        f"<article><h1>{title}</h1>{paragraphs}</article><footer>Imprint</footer></body></html>"
    )


class Warc:
    """A file that is written record by record."""

    def __init__(self, path: Path, gzip: bool = True) -> None:
        self._file = path.open("wb")
        self._writer = WARCWriter(self._file, gzip=gzip)

    def response(
        self, url: str, body: bytes, headers: dict[str, str] | None = None, status: str = "200 OK"
    ) -> None:
        """A response as a crawler stores it."""
        given = headers if headers is not None else {"Content-Type": "text/html; charset=utf-8"}
        http = StatusAndHeaders(status, list(given.items()), protocol="HTTP/1.1")
        self.record("response", url, body, http)

    def record(self, kind: str, url: str, body: bytes, http: object = None) -> None:
        """A record of any type."""
        number = f"<urn:uuid:{len(url):08d}-{abs(hash(url)) % 10**8:08d}>"
        record = self._writer.create_warc_record(
            url,
            kind,
            payload=io.BytesIO(body),
            http_headers=http,
            warc_headers_dict={"WARC-Date": DATE, "WARC-Record-ID": number},
        )
        self._writer.write_record(record)

    def close(self) -> None:
        """End the file."""
        self._file.close()
