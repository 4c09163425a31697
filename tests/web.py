"""A web server of one folder, as good or as bad as a test wants it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar


class Handler(SimpleHTTPRequestHandler):
    """Hands out parts of files, with ETags."""

    ranges = True
    lengths = True
    heads = True
    versions = True
    faults: ClassVar[list[int]] = []
    """Statuses that the next requests for a file are answered with."""

    def log_message(self, format: str, *args: Any) -> None:
        """Not to the tests' own stderr."""

    def do_HEAD(self) -> None:
        if not self.heads:
            self.send_error(405)
        else:
            self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            (super().do_GET if body else super().do_HEAD)()
            return
        if self.faults and path.exists():
            self.send_error(self.faults.pop())
            return
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = 0, len(data)
        if asked and self.ranges:
            start, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
        if start >= len(data) and asked and self.ranges:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if asked and self.ranges else 200)
        if asked and self.ranges:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        if self.lengths:
            self.send_header("Content-Length", str(end - start))
        if self.versions:
            self.send_header("ETag", f'"{hash(data):x}"')
        self.end_headers()
        if body:
            self.wfile.write(data[start:end])


@contextmanager
def web_server(folder: Path, **traits: Any) -> Iterator[str]:
    """The URL of a server of a folder; `traits` are attributes of `Handler`."""
    kind = type("Odd", (Handler,), {"faults": [], **traits})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
