"""A real S3 server seen through a gateway that does one thing wrong."""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

HOP = ("connection", "transfer-encoding", "keep-alive", "server")

REFUSED = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>InvalidAccessKeyId</Code><Message>The access key is not known.</Message></Error>"""


@dataclass(frozen=True, slots=True)
class Faults:
    """What the gateway does to requests and replies."""

    ignores_conditions: bool = False
    """If-None-Match and If-Match never reach the store: it overwrites."""
    seconds_ahead: float = 0.0
    """Its clock."""
    knows_key: str = ""
    """Requests that are signed with another key, or with none, are refused; empty: nobody is."""


@contextmanager
def gateway(endpoint: str, faults: Faults) -> Iterator[str]:
    """A gateway to an S3 server; its endpoint."""
    if faults.ignores_conditions and os.environ.get("TRAINYARD_TEST_S3_ENDPOINT"):
        pytest.skip("a store that checks signatures, unlike moto, misses signed headers")
    upstream = urlsplit(endpoint)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            signed = self.headers.get("Authorization", "")
            if faults.knows_key and f"Credential={faults.knows_key}/" not in signed:
                self._reply(403, {"Content-Type": "application/xml"}, REFUSED)
                return
            headers = {
                name: value
                for name, value in self.headers.items()
                if not (faults.ignores_conditions and name.lower() in ("if-match", "if-none-match"))
            }
            connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port)
            try:
                connection.request(self.command, self.path, body, headers)
                reply = connection.getresponse()
                self._reply(reply.status, dict(reply.getheaders()), reply.read())
            finally:
                connection.close()

        def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            is_head = self.command == "HEAD"
            sent = {n: v for n, v in headers.items() if n.lower() not in (*HOP, "date")}
            if not is_head:
                sent = {n: v for n, v in sent.items() if n.lower() != "content-length"}
                sent["Content-Length"] = str(len(body))
            date = headers.get("Date") or headers.get("date") or formatdate(usegmt=True)
            then = parsedate_to_datetime(date).timestamp() + faults.seconds_ahead
            self.send_response_only(status)
            for name, value in {**sent, "Date": formatdate(then, usegmt=True)}.items():
                self.send_header(name, value)
            self.end_headers()
            if not is_head:
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
