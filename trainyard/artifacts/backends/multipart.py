"""Multipart uploads to an S3 store: an object of whole files, and an object that is written.

The store itself copies objects that it holds. Other files, and ranges shorter than a part may be,
are read and uploaded. Every byte is read once either way, for the digest."""

# ruff: noqa: D102 (`base` documents these methods)

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trainyard.artifacts.backends.base import Multipart, Read, SourceFile, Writer, log_failure
from trainyard.artifacts.backends.readahead import ByteRange, blocks, read_in_order
from trainyard.errors import InfrastructureError

log = logging.getLogger(__name__)

MIN_PART = 5 << 20
"""S3: every part but the last is at least this."""
MAX_PART = 5 << 30
MAX_PARTS = 10_000

COPY_BYTES = 128 << 20
"""A copied part: some seconds of the store's time; several are copied at once."""
UPLOAD_BYTES = 16 << 20
IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class UploadPart:
    """One part of the upload."""

    ranges: tuple[ByteRange, ...]
    is_copied: bool
    """The store copies it from one range."""


def plan_parts(
    ranges: Sequence[tuple[ByteRange, bool]], copy_bytes: int, upload_bytes: int
) -> list[UploadPart]:
    """Parts in order, for ranges given with whether the store can copy them.

    An uploaded part takes bytes of the next range until it has the minimum size of a part."""
    parts: list[UploadPart] = []
    pending: list[ByteRange] = []
    size = 0

    def take(part: ByteRange, count: int) -> ByteRange:
        nonlocal size
        if count:
            pending.append(part._replace(end=part.start + count))
            size += count
        return part._replace(start=part.start + count)

    def flush() -> None:
        nonlocal size
        if pending:
            parts.append(UploadPart(tuple(pending), is_copied=False))
            pending.clear()
            size = 0

    for part, can_copy in ranges:
        missing = max(0, MIN_PART - size) if pending else 0
        if can_copy and part.end - part.start - missing >= MIN_PART:
            rest = take(part, missing)
            flush()
            parts += [UploadPart((one,), is_copied=True) for one in _split_evenly(rest, copy_bytes)]
            continue
        rest = part
        while rest.start < rest.end:
            rest = take(rest, min(rest.end - rest.start, upload_bytes - size))
            if size == upload_bytes:
                flush()
    flush()
    return parts


def _split_evenly(part: ByteRange, longest: int) -> list[ByteRange]:
    """Ranges of nearly equal length, so that the last is not too short for a part."""
    count = -(-(part.end - part.start) // longest)
    bounds = [part.start + (part.end - part.start) * i // count for i in range(count + 1)]
    return [part._replace(start=bounds[i], end=bounds[i + 1]) for i in range(count)]


class MultipartUpload:
    """An object being uploaded: invisible until `complete`, removed by `abort`."""

    def __init__(self, backend: Multipart, url: str, upload_id: str | None = None) -> None:
        """upload_id: of an upload that was begun before, here or elsewhere; None: begin one."""
        self._backend = backend
        self._url = url
        target = backend.address(url)
        if upload_id is None:
            upload_id = str(backend.call("create_multipart_upload", **target)["UploadId"])
        self.id = upload_id
        self._target: dict[str, str] = {**target, "UploadId": upload_id}
        self.etags: dict[int, str] = {}
        """Of the parts that were made, by number."""
        self._size = 0

    def exists(self) -> bool:
        """Whether it is neither completed nor aborted."""
        try:
            self._backend.call("list_parts", **self._target, MaxParts=1)
        except FileNotFoundError:
            return False
        return True

    def fill(
        self,
        sources: Sequence[SourceFile],
        digest: Any,
        on_bytes: Callable[[int], object],
        read: Read,
    ) -> None:
        """Make the parts of all files, end to end; `digest.update` gets all bytes in order."""
        self._size = sum(source.size_bytes for source in sources)
        parts = self._plan(sources)
        if len(parts) > MAX_PARTS:
            log.info("%d files are more than the parts of an upload: reading them", len(sources))
            parts = self._plan(sources, may_copy=False)
        first = next((n for n, planned in enumerate(parts, 1) if planned.is_copied), None)
        if first is not None and not self.can_copy(first, parts[first - 1].ranges[0]):
            parts = self._plan(sources, may_copy=False)
        self._make(parts, digest, on_bytes, read)

    def _plan(self, sources: Sequence[SourceFile], may_copy: bool = True) -> list[UploadPart]:
        ranges = [
            (
                ByteRange(s.url, 0, s.size_bytes, s.version),
                may_copy and self._backend.holds(s.url),
            )
            for s in sources
        ]
        copy_bytes = min(max(COPY_BYTES, self._size // (MAX_PARTS // 2)), MAX_PART)
        return plan_parts(ranges, copy_bytes, max(UPLOAD_BYTES, self._size // (MAX_PARTS - 1000)))

    def can_copy(self, number: int, part: ByteRange) -> bool:
        """Copy a part; False, with a warning, if the store does not do that."""
        try:
            self.copy(number, part)
        except InfrastructureError as error:
            log.warning("the store does not copy parts itself, reading them instead: %s", error)
            return False
        return True

    def _make(
        self,
        parts: Sequence[UploadPart],
        digest: Any,
        on_bytes: Callable[[int], object],
        read: Read,
    ) -> None:
        data = read_in_order((part for planned in parts for part in blocks(planned.ranges)), read)
        pending: deque[Future[None]] = deque()
        executor = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="upload")
        try:
            for number, planned in enumerate(parts, 1):
                while len(pending) >= IN_FLIGHT:
                    pending.popleft().result()
                if planned.is_copied and number not in self.etags:
                    pending.append(executor.submit(self.copy, number, planned.ranges[0]))
                buffer = bytearray()
                for _ in blocks(planned.ranges):
                    block = next(data)
                    digest.update(block)
                    on_bytes(len(block))
                    if not planned.is_copied:
                        buffer += block
                if not planned.is_copied:
                    pending.append(executor.submit(self.upload, number, buffer))
            while pending:
                pending.popleft().result()
        finally:
            data.close()  # type: ignore[attr-defined]  # a generator; stops its threads
            executor.shutdown(wait=True, cancel_futures=True)

    def copy(self, number: int, part: ByteRange) -> None:
        """Let the store make one part of a range of an object; callable from any thread."""
        reply = self._backend.call(
            "upload_part_copy",
            **self._target,
            PartNumber=number,
            CopySource=self._backend.address(part.url),
            CopySourceRange=f"bytes={part.start}-{part.end - 1}",
        )
        self.etags[number] = reply["CopyPartResult"]["ETag"]

    def upload(self, number: int, data: bytes | bytearray) -> None:
        """Upload one part, numbered from 1; callable from any thread."""
        reply = self._backend.call("upload_part", **self._target, PartNumber=number, Body=data)
        self.etags[number] = reply["ETag"]

    def complete(self, size_bytes: int) -> None:
        """Make the object appear."""
        parts = [{"PartNumber": n, "ETag": tag} for n, tag in sorted(self.etags.items())]
        try:
            self._backend.call(
                "complete_multipart_upload", **self._target, MultipartUpload={"Parts": parts}
            )
        except FileNotFoundError:
            # An earlier attempt of this call may have succeeded although its answer was lost.
            if self._backend.size_and_version(self._url)[0] != size_bytes:
                raise

    def abort(self) -> None:
        """Remove all parts."""
        self._backend.call("abort_multipart_upload", **self._target)


# --- writers ----------------------------------------------------------------------------------


PART_BYTES = 16 << 20
GROWTH_PARTS = 500
PARTS_IN_FLIGHT = 2
"""Parts of one object that are sent while the next is filled. So a writer holds three parts at
most; for each of several whose bytes it writes, two more."""


def part_bytes(number: int) -> int:
    """Bytes of a part, counted from 1: a quarter more every 500 parts, so that the 10,000 parts of
    an object hold more than two terabytes."""
    steps = (number - 1) // GROWTH_PARTS
    return int(PART_BYTES * 1.25**steps)


class S3Writer(Writer):
    """One put for an object shorter than a part; otherwise parts, sent by the writer's threads."""

    def __init__(self, backend: Multipart, url: str) -> None:
        self._backend = backend
        self._url = url
        self._buffer = bytearray()
        self._number = 0
        self._size = 0
        self._upload: MultipartUpload | None = None
        self._is_whole = False
        """Files were appended; nothing can follow them."""
        self._threads: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()
        self._in_flight = PARTS_IN_FLIGHT

    def write_for(self, num_writers: int) -> None:
        self._in_flight = PARTS_IN_FLIGHT * num_writers

    def write(self, data: memoryview) -> int:
        assert not self._is_whole, "files were appended: nothing can follow them"
        self._buffer += data
        self._size += len(data)
        if len(self._buffer) >= part_bytes(self._number + 1):
            self._send()
        return len(data)

    def _send(self) -> None:
        """Send the buffered part; wait if too many parts are in flight."""
        if self._upload is None:
            self._upload = MultipartUpload(self._backend, self._url)
            self._threads = ThreadPoolExecutor(self._in_flight, thread_name_prefix="upload")
        assert self._threads is not None
        if len(self._pending) == self._in_flight:
            self._pending.popleft().result()
        self._number += 1
        part, self._buffer = self._buffer, bytearray()
        self._pending.append(self._threads.submit(self._upload.upload, self._number, part))

    def append_files(
        self,
        sources: Sequence[SourceFile],
        digest: Any,
        on_bytes: Callable[[int], object],
        read: Read,
    ) -> bool:
        small = sum(source.size_bytes for source in sources) < MIN_PART
        if small or self._buffer or self._upload is not None:
            return False
        self._upload = MultipartUpload(self._backend, self._url)
        self._is_whole = True
        self._size = sum(source.size_bytes for source in sources)
        self._upload.fill(sources, digest, on_bytes, read)
        return True

    def publish(self) -> None:
        if self._upload is None:
            self._backend.call("put_object", **self._backend.address(self._url), Body=self._buffer)
        else:
            if self._buffer:
                self._send()
            while self._pending:
                self._pending.popleft().result()
            self._upload.complete(self._size)
        self._end()

    def discard(self) -> None:
        self._end()
        with log_failure():
            if self._upload is not None:
                self._upload.abort()

    def _end(self) -> None:
        self._buffer = bytearray()
        self._pending.clear()
        if self._threads is not None:  # wait for parts in flight: an abort must come after them
            self._threads.shutdown(wait=True, cancel_futures=True)
