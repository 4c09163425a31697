"""Files behind http:// and https://: read one by one, in ranges, and never written.

A web server lists no folder and has no conditional writes, so patterns, folders and outputs are
refused with an error. Uses the standard library only."""

# ruff: noqa: D102 (`base` documents these methods)

from __future__ import annotations

import time
from email.message import Message
from http.client import HTTPException
from typing import Any, BinaryIO, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request

from trainyard.artifacts.backends.base import Writer
from trainyard.artifacts.backends.fsspec import FsspecBackend
from trainyard.artifacts.backends.readahead import open_ranged
from trainyard.artifacts.backends.web_access import open_url
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError
from trainyard.version import VERSION

TIMEOUT_SECONDS = 30.0
ATTEMPTS = 3
PAUSE_SECONDS = 0.5

SAFE = "%/:?#[]@!$&'()*+,;=~"
"""Characters that a URL may contain as they are; others are escaped."""

GONE = (404, 410)
REFUSED = (401, 403, 407)
NO_HEAD = (405, 501)
"""Answers of servers without HEAD."""

PAST_THE_END = 416
MAX_DOCUMENT_BYTES = 2**24
DOWNLOAD = "download it and give the path of the copy"


class HttpBackend(FsspecBackend):
    """A web server."""

    def open_input(self, url: str) -> BinaryIO:
        size, version = self.size_and_version(url)
        return open_ranged(self, url, size, version)

    def read_range(self, url: str, start: int, end: int, version: str | None) -> bytes:
        asked = {"Range": f"bytes={start}-{end - 1}"}
        status, headers, data, _ = _ask(url, "GET", asked, end - start)
        if status == PAST_THE_END:
            return b""
        now = _version(headers)
        if version and now and version != now:
            raise ArtifactError(f"{url}: changed while it was being read")
        if status != 206 and start:
            raise ArtifactError(
                f"{url}: the server does not serve parts of a file (it ignores Range), and this "
                f"one has more than {start} bytes; {DOWNLOAD}"
            )
        return data

    def read_version(self, url: str) -> tuple[bytes, str]:
        _, headers, data, _ = _ask(url, "GET", {}, None)
        return data, _version(headers)

    def read_document(self, url: str) -> bytes:
        _, _, data, _ = _ask(url, "GET", {}, MAX_DOCUMENT_BYTES + 1, stays=True)
        if len(data) > MAX_DOCUMENT_BYTES:
            raise ArtifactError(f"{url}: a document of more than {MAX_DOCUMENT_BYTES} bytes")
        return data

    def size_and_version(self, url: str) -> tuple[int, str]:
        headers, final = self._look_at(url)
        if final.endswith("/"):
            raise FileNotFoundError(url)
        size = headers.get("Content-Range", "").rpartition("/")[2] or headers.get("Content-Length")
        if not (size or "").isdigit():
            raise ArtifactError(
                f"{url}: the server does not give the size of the file (no Content-Length); "
                f"{DOWNLOAD}"
            )
        return int(size or 0), _version(headers)

    def _look_at(self, url: str) -> tuple[Message, str]:
        """Headers, and the URL after redirects."""
        status, headers, _, final = _ask(url, "HEAD", {}, 0)
        if status in NO_HEAD or "Content-Length" not in headers:
            _, headers, _, final = _ask(url, "GET", {"Range": "bytes=0-0"}, 0)
        return headers, final

    def is_file(self, url: str) -> bool:
        try:
            return not self._look_at(url)[1].endswith("/")
        except FileNotFoundError:
            return False

    def list_files(self, url: str) -> dict[str, int]:
        try:
            self._look_at(url)
        except FileNotFoundError:
            return {}
        self._no_listing(url)

    def list_folder(self, url: str) -> dict[str, tuple[int, str]]:
        return {}  # the server lists no folder, and no caller needs it

    def list_subfolders(self, url: str) -> list[str]:
        return []  # likewise

    def glob(self, url: str) -> list[str]:
        self._no_listing(url)

    def _no_listing(self, url: str) -> NoReturn:
        raise ConfigError(
            f"{url}: a web server does not list a folder; name every file by its own URL"
        )

    # --- refused --------------------------------------------------------------------------

    def open_output(self, url: str) -> Writer:
        self._cannot(url)

    def delete(self, url: str) -> None:
        self._cannot(url)

    def delete_tree(self, url: str) -> None:
        self._cannot(url)

    def move_tree(self, source: str, target: str) -> None:
        self._cannot(source)


def _version(headers: Message) -> str:
    """ETag or modification time; empty if the server sends neither."""
    return str(headers["ETag"] or headers["Last-Modified"] or "")


def _ask(
    url: str, method: str, headers: dict[str, str], size: int | None, *, stays: bool = False
) -> tuple[int, Message, bytes, str]:
    """Status, headers, the first `size` bytes of the body (None: all), and the URL after redirects.
    Retries errors that may be temporary. stays: refuse a redirect to another server."""
    name = {"User-Agent": f"trainyard/{VERSION}", "Accept-Encoding": "identity"}
    request = Request(quote(url, safe=SAFE), headers=name | headers, method=method)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with open_url(request, TIMEOUT_SECONDS, stays=stays) as reply:
                data = reply.read() if size is None else _read(reply, size)
                return reply.status, reply.headers, data, reply.geturl()
        except HTTPError as error:
            error.close()
            if error.code == PAST_THE_END or (method == "HEAD" and error.code in NO_HEAD):
                return error.code, error.headers, b"", url
            if attempt == ATTEMPTS or not (error.code == 429 or error.code >= 500):
                _refuse(url, error)
        except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
            if attempt == ATTEMPTS:
                reason = getattr(error, "reason", None) or f"{type(error).__name__} {error}"
                raise InfrastructureError(f"{url}: cannot be read: {reason}") from error
        time.sleep(PAUSE_SECONDS * 2**attempt)
    raise AssertionError("unreachable")


def _read(reply: Any, size: int) -> bytes:
    """Up to `size` bytes; a reply may arrive in several reads."""
    pieces, left = [], size
    while left and (piece := reply.read(left)):
        pieces.append(piece)
        left -= len(piece)
    length = reply.headers.get("Content-Length")
    if left and length is not None and int(length) > size - left:
        raise ConnectionError(f"the connection broke off {left} bytes before the end")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _refuse(url: str, error: HTTPError) -> NoReturn:
    status = f"HTTP status {error.code} {error.reason}".rstrip()
    if error.code in GONE:
        raise FileNotFoundError(url) from error
    if error.code in REFUSED:
        raise PermissionError(status) from error
    if error.code >= 500 or error.code == 429:
        raise InfrastructureError(f"{url}: the server answers with {status}") from error
    raise ArtifactError(f"{url}: the server answers with {status}") from error
