"""A web server that misbehaves: what it does is in the path that is asked for."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections import Counter
from typing import Any

from tests.trainyard.collection.sources.warcs import html

DATE = "Sun, 01 Nov 2026 00:00:00 GMT"
ROBOTS = "User-agent: *\nDisallow: /private\n\nUser-agent: other\nDisallow: /\n"
PAGE = html("A page", "Words of a page").encode()


class BadServer:
    """Listens on a free port of this machine while it is entered."""

    def __init__(self, robots: str | int = ROBOTS) -> None:
        """robots: the text of robots.txt, or the status that it has."""
        self.robots = robots
        self.asked: list[tuple[float, str]] = []
        """When, and for what path."""
        self.counts: Counter[str] = Counter()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        """The address of a page."""
        return f"http://{host}:{self.port}{path}"

    def __enter__(self) -> BadServer:
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)

    def _serve(self, started: threading.Event) -> None:
        async def main() -> None:
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            await self._end.wait()
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run(main())

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
            self.asked.append((time.monotonic(), path))
            self.counts[path] += 1
            await self._send(path, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has had enough, which is what is tested
        finally:
            writer.close()

    async def _send(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/robots.txt":
            if isinstance(self.robots, int):
                return self._reply(writer, self.robots)
            return self._reply(writer, 200, self.robots.encode(), type="text/plain")
        kind = path.split("/")[1]
        if kind in ("endless", "loris"):
            writer.write(self._head(200, {"Content-Type": "text/html"}))
            while True:
                writer.write(b"x" * 65536 if kind == "endless" else b"x")
                await writer.drain()
                await asyncio.sleep(0 if kind == "endless" else 0.05)
        if kind == "silent":
            await asyncio.sleep(60)
        if kind == "headers":
            writer.write(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000)
            return await writer.drain()
        if kind == "nonsense":
            return writer.write(b"\x00\x01 hello\r\n\r\n")
        if kind == "short":
            writer.write(self._head(200, {"Content-Type": "text/html", "Content-Length": "9999"}))
            return writer.write(PAGE[:100])
        return self._reply(writer, *self._made(kind, path))

    def _made(self, kind: str, path: str) -> tuple[Any, ...]:
        number = self.counts[path]
        if kind == "busy":
            return (429, b"", {"Retry-After": "0"}) if number < 3 else (200, PAGE)
        if kind == "failing":
            return (500,) if number < 2 else (200, PAGE)
        if kind == "chain":
            left = int(path.rpartition("/")[2])
            return (302, b"", {"Location": f"/chain/{left - 1}"}) if left else (200, PAGE)
        if kind == "gzip":
            return 200, gzip.compress(PAGE), {"Content-Encoding": "gzip"}
        moved = {
            "circle": "/circle2",
            "circle2": "/circle",
            "file": "file:///etc/passwd",
            "metadata": "http://169.254.169.254/latest/meta-data/",
            "forbidden": "/private/x",
            "malformed": "http://[",
            "user": f"http://a:b@127.0.0.1:{self.port}/page",
        }
        if kind in moved:
            return 301, b"", {"Location": moved[kind]}
        if kind.isdigit():
            return (int(kind),)
        if kind == "picture":
            return 200, b"\x89PNG", {}, "image/png"
        if kind == "large":
            return 200, PAGE * 400
        return 200, PAGE

    def _reply(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        type: str = "text/html",
    ) -> None:
        given = {"Content-Type": type, "Content-Length": str(len(body)), **(headers or {})}
        writer.write(self._head(status, given) + body)

    @staticmethod
    def _head(status: int, headers: dict[str, str]) -> bytes:
        lines = [f"HTTP/1.1 {status} Status", f"Date: {DATE}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()
