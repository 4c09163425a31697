"""The web server: GET and HEAD of the names in a root, and a message for all other requests.

It has no password, so by default it listens on this machine only. It answers only to its own host
names: the header Host reveals a page of another site whose name resolves to 127.0.0.1 (DNS
rebinding). Runs wrote the files, so they are not trusted: no script runs in them, they load
nothing, and no other page can read them."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

from flows.browse.listing import listing
from flows.browse.root import DOWNLOAD, KINDS, TEXT, RefusedError, Root
from trainyard.artifacts.urls import basename, join
from trainyard.errors import ArtifactError, InfrastructureError, TrainyardError
from trainyard.hosts import OURS, RULE, host_name, not_ours

log = logging.getLogger(__name__)

HEALTH = "/.health"
"""Answers without the store. No file has this name, because names with a dot are hidden."""

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; sandbox allow-downloads"
)
"""Stricter than the run card's own policy: no page may be framed, post or have an origin. A click
may download a file, as the links of run cards do; nothing does so without one, since that takes a
script or a frame."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

IDLE_SECONDS = 30.0
"""Limit of a connection without requests or progress."""
MOST_CONNECTIONS = 64
WAIT_SECONDS = 0.5
"""How long one more connection waits for its turn; others wait behind it."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response."""

    status: HTTPStatus
    kind: str
    size_bytes: int
    blocks: Iterable[bytes]
    headers: dict[str, str] = field(default_factory=dict)


class BrowseServer(ThreadingHTTPServer):
    """Serves one root; each request in a thread that does not delay the exit.

    At most MOST_CONNECTIONS at once: a connection that finds none free is closed, so those who
    open many take no more threads, files and memory than that."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, root: Root, host: str, port: int, names: Iterable[str] = ()) -> None:
        """names: host names that it answers to besides those of this machine. Raises OSError if it
        cannot listen on the address."""
        self.root = root
        self.names = OURS | {host.lower()} | {name.lower() for name in names}
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        """Bind without http.server's look-up of our own name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "trainyard", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to answer in a thread, unless too many are at work for too long."""
        if not self._free.acquire(timeout=WAIT_SECONDS):
            log.warning("%d connections are open: one more is closed", MOST_CONNECTIONS)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error after a response began, which can only be cut short."""
        log.warning("a response to %s was cut short", client_address[0], exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: BrowseServer
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """A file or a folder."""
        self._respond(with_body=True)

    def do_HEAD(self) -> None:
        """The same without a body."""
        self._respond(with_body=False)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer requests that http.server refuses: malformed ones, and all other methods."""
        status, text = HTTPStatus(code), message or HTTPStatus(code).description
        headers: dict[str, str] = {}
        if status is HTTPStatus.NOT_IMPLEMENTED:
            status, headers = HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"}
            text = "only GET and HEAD: this server is read-only"
        self._send(_message(status, text, headers), with_body=self.command != "HEAD")

    def version_string(self) -> str:
        """The header Server."""
        return "trainyard"

    def log_message(self, format: str, *args: Any) -> None:
        """Log requests at level debug only."""
        log.debug("%s " + format, self.address_string(), *args)

    def _respond(self, with_body: bool) -> None:
        with ExitStack() as held:
            self._send(self._answer(held), with_body)

    def _answer(self, held: ExitStack) -> Response:
        """The response; `held` keeps its file open until it is sent."""
        try:
            self._check_host()
            return self._found(held)
        except RefusedError as error:
            return _message(error.status, str(error))
        except TrainyardError as error:
            return _message(_status_of(error), str(error))
        except Exception:
            log.exception("%s", self.path)
            text = "a defect of trainyard; see the log of this server"
            return _message(HTTPStatus.INTERNAL_SERVER_ERROR, text)

    def _check_host(self) -> None:
        """RefusedError unless the request has one Host, a name of this server."""
        name = host_name(self.headers.get_all("Host", []))
        if name is None:
            raise RefusedError(HTTPStatus.BAD_REQUEST, RULE)
        if name not in self.server.names:
            raise RefusedError(HTTPStatus.MISDIRECTED_REQUEST, not_ours(name))

    def _found(self, held: ExitStack) -> Response:
        path, root = self.path.partition("?")[0], self.server.root
        if path == HEALTH:
            return _message(HTTPStatus.OK, "ok")
        name = _name(path)
        if not path.endswith("/"):
            if root.is_file(name):
                return self._file(name, held)
            if root.is_folder(name):
                link = f"./{quote(basename(name), safe='')}/"
                return _message(HTTPStatus.FOUND, "a folder", {"Location": link})
        elif root.is_folder(name):
            return self._folder(name)
        raise RefusedError(
            HTTPStatus.NOT_FOUND, f"{join(root.url, name)}: there is no such file here"
        )

    def _file(self, name: str, held: ExitStack) -> Response:
        kind = self.server.root.kind(name)
        if kind is None:
            raise RefusedError(
                HTTPStatus.FORBIDDEN,
                f"{join(self.server.root.url, name)}: files of this kind are not shown, only "
                f"{', '.join(sorted(KINDS))}, and profiles of a training",
            )
        size, blocks = held.enter_context(self.server.root.opened(name))
        headers = {"Content-Disposition": "attachment"} if kind == DOWNLOAD else {}
        return Response(HTTPStatus.OK, kind, size, blocks, headers)

    def _folder(self, name: str) -> Response:
        root = self.server.root
        folders, files = root.entries(name)
        linked = [one for one in files if root.is_shown(join(name, one))]
        page = listing(root.url, name, folders, files, linked)
        return Response(HTTPStatus.OK, KINDS[".html"], len(page), [page])

    def _send(self, answer: Response, with_body: bool) -> None:
        """Send it. If a file ends early, the connection does too, and the Content-Length shows the
        browser that something is missing."""
        self.close_connection = True
        try:
            self.send_response(answer.status)
            for name, value in {**HEADERS, **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("Cross-Origin-Resource-Policy", _readers(answer.kind))
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(answer.size_bytes))
            self.end_headers()
            for block in answer.blocks if with_body else ():
                self.wfile.write(block)
        except (ConnectionError, TimeoutError):
            log.debug("the browser closed the connection")


def _name(path: str) -> str:
    """The name in the root for the path of a URL."""
    if not path.startswith("/"):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "ask for a path, such as /quickstart/card.html")
    try:
        return unquote(path, errors="strict").removeprefix("/").removesuffix("/")
    except UnicodeDecodeError as error:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "the path is not UTF-8") from error


def _readers(kind: str) -> str:
    """Which origins may embed a file: Prefect's pages, of another origin, embed pictures."""
    return "cross-origin" if kind.startswith("image/") else "same-origin"


def _message(status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> Response:
    data = f"{text}\n".encode(errors="backslashreplace")
    return Response(status, TEXT, len(data), [data], headers or {})


def _status_of(error: TrainyardError) -> HTTPStatus:
    if isinstance(error, ArtifactError):
        return HTTPStatus.NOT_FOUND
    if isinstance(error, InfrastructureError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.INTERNAL_SERVER_ERROR  # a wrong setup: credentials, permissions
