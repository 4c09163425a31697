"""Objects on their way into a store: invisible until they are complete."""

# ruff: noqa: D102 (what the methods do is written in `backend`)

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from trainyard.artifacts.backends.base import Multipart, Read, SourceFile
from trainyard.artifacts.backends.multipart import MIN_PART, MultipartUpload
from trainyard.artifacts.backends.uncached import Fill

log = logging.getLogger(__name__)

PART_BYTES = 16 << 20
GROWTH_PARTS = 500
IN_FLIGHT = 2
"""Parts of one object that are sent while the next is filled: what bounds the memory of a writer
to three parts, whatever it is given."""


def part_bytes(number: int) -> int:
    """Bytes of a part, counted from 1: a quarter more every 500 parts, so that the 10,000 that an
    object may have hold more than two terabytes."""
    steps = (number - 1) // GROWTH_PARTS
    return int(PART_BYTES * 1.25**steps)


class S3Writer:
    """One put for what is shorter than a part; parts else, sent by threads of the writer's own."""

    def __init__(self, backend: Multipart, url: str) -> None:
        self._backend = backend
        self._url = url
        self._held = bytearray()
        self._number = 0
        self._size = 0
        self._upload: MultipartUpload | None = None
        self._is_whole = False
        """Files were appended: nothing can follow them."""
        self._threads: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def write(self, data: memoryview) -> int:
        assert not self._is_whole, "files were appended: nothing can follow them"
        self._held += data
        self._size += len(data)
        if len(self._held) >= part_bytes(self._number + 1):
            self._send()
        return len(data)

    def _send(self) -> None:
        """Hand the part over, when there is room for one more in flight."""
        if self._upload is None:
            self._upload = MultipartUpload(self._backend, self._url)
            self._threads = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="upload")
        assert self._threads is not None
        if len(self._pending) == IN_FLIGHT:
            self._pending.popleft().result()
        self._number += 1
        part, self._held = self._held, bytearray()
        self._pending.append(self._threads.submit(self._upload.upload, self._number, part))

    def append_files(
        self,
        sources: Sequence[SourceFile],
        digest: Any,
        on_bytes: Callable[[int], object],
        read: Read,
    ) -> bool:
        small = sum(source.size_bytes for source in sources) < MIN_PART
        if small or self._held or self._upload is not None:
            return False
        self._upload = MultipartUpload(self._backend, self._url)
        self._is_whole = True
        self._size = sum(source.size_bytes for source in sources)
        self._upload.fill(sources, digest, on_bytes, read)
        return True

    def append_filled(
        self, size: int, fill: Fill, digest: Any, on_bytes: Callable[[int], object]
    ) -> bool:
        return False

    def publish(self) -> None:
        if self._upload is None:
            place = self._backend.place(self._url)
            self._backend.call("put_object", **place, Body=self._held)
        else:
            if self._held:
                self._send()
            while self._pending:
                self._pending.popleft().result()
            self._upload.complete(self._size)
        self._end()

    def discard(self) -> None:
        self._end()
        with quiet():
            if self._upload is not None:
                self._upload.abort()

    def _end(self) -> None:
        self._held = bytearray()
        self._pending.clear()
        if self._threads is not None:  # waits for parts in flight: an abort must come after them
            self._threads.shutdown(wait=True, cancel_futures=True)


class FsspecWriter:
    """By the means of a file system of fsspec's."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: memoryview) -> int:
        return int(self._file.write(data))

    def append_files(
        self,
        sources: Sequence[SourceFile],
        digest: Any,
        on_bytes: Callable[[int], object],
        read: Read,
    ) -> bool:
        return False

    def append_filled(
        self, size: int, fill: Fill, digest: Any, on_bytes: Callable[[int], object]
    ) -> bool:
        return False

    def publish(self) -> None:
        self._file.close()

    def discard(self) -> None:
        with quiet():
            if not self._file.closed:
                self._file.discard()
            self._file.closed = True


@contextmanager
def quiet() -> Iterator[None]:
    """For a clean-up on the way out of another error, which must not be hidden by this one."""
    try:
        yield
    except Exception as error:
        log.warning("could not clean up: %s", error)
