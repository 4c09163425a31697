"""Files to one object of an S3 store, as the parts of an upload.

What lies in the same store is copied there, by the store itself; what does not, and ranges shorter
than a part may be, is read and uploaded. Every byte is read once either way, for the digest."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trainyard.artifacts.backends.base import Multipart, Read, SourceFile
from trainyard.artifacts.backends.ranges import ByteRange, blocks, read_in_order
from trainyard.errors import InfrastructureError

log = logging.getLogger(__name__)

MIN_PART = 5 << 20
"""S3: every part but the last is at least this."""
MAX_PART = 5 << 30
MAX_PARTS = 10_000

COPY_BYTES = 128 << 20
"""A copied part: some seconds of the store's time, and several at once."""
UPLOAD_BYTES = 16 << 20
IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class UploadPart:
    """One part of the upload."""

    ranges: tuple[ByteRange, ...]
    is_copied: bool
    """By the store, from one range."""


def plan_pieces(
    ranges: Sequence[tuple[ByteRange, bool]], copy_bytes: int, upload_bytes: int
) -> list[UploadPart]:
    """Parts in order, for ranges given with whether the store could copy them.

    A part that is uploaded grows by the head of the next range until it may stand alone."""
    pieces: list[UploadPart] = []
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
            pieces.append(UploadPart(tuple(pending), is_copied=False))
            pending.clear()
            size = 0

    for part, can_copy in ranges:
        missing = max(0, MIN_PART - size) if pending else 0
        if can_copy and part.end - part.start - missing >= MIN_PART:
            rest = take(part, missing)
            flush()
            pieces += [
                UploadPart((one,), is_copied=True) for one in _split_evenly(rest, copy_bytes)
            ]
            continue
        rest = part
        while rest.start < rest.end:
            rest = take(rest, min(rest.end - rest.start, upload_bytes - size))
            if size == upload_bytes:
                flush()
    flush()
    return pieces


def _split_evenly(part: ByteRange, longest: int) -> list[ByteRange]:
    """Ranges of nearly equal length, lest the last be too short to stand alone."""
    count = -(-(part.end - part.start) // longest)
    bounds = [part.start + (part.end - part.start) * i // count for i in range(count + 1)]
    return [part._replace(start=bounds[i], end=bounds[i + 1]) for i in range(count)]


class MultipartUpload:
    """An object in the making: invisible until `complete`, gone after `abort`."""

    def __init__(self, backend: Multipart, url: str) -> None:
        self._backend = backend
        self._url = url
        self._target = backend.place(url)
        reply = backend.call("create_multipart_upload", **self._target)
        self._target["UploadId"] = reply["UploadId"]
        self._etags: dict[int, str] = {}
        self._size = 0

    def fill(
        self,
        sources: Sequence[SourceFile],
        digest: Any,
        on_bytes: Callable[[int], object],
        read: Read,
    ) -> None:
        """Make the parts of all files, end to end; `digest.update` is told all bytes in order."""
        self._size = sum(source.size_bytes for source in sources)
        pieces = self._plan(sources)
        if len(pieces) > MAX_PARTS:
            log.info("%d files are more than an upload has parts: reading them", len(sources))
            pieces = self._plan(sources, may_copy=False)
        first = next((n for n, piece in enumerate(pieces, 1) if piece.is_copied), None)
        if first is not None and not self._can_copy(first, pieces[first - 1]):
            pieces = self._plan(sources, may_copy=False)
        self._make(pieces, digest, on_bytes, read)

    def _plan(self, sources: Sequence[SourceFile], may_copy: bool = True) -> list[UploadPart]:
        ranges = [
            (
                ByteRange(s.url, 0, s.size_bytes, s.version),
                may_copy and self._backend.holds(s.url),
            )
            for s in sources
        ]
        copy_bytes = min(max(COPY_BYTES, self._size // (MAX_PARTS // 2)), MAX_PART)
        return plan_pieces(ranges, copy_bytes, max(UPLOAD_BYTES, self._size // (MAX_PARTS - 1000)))

    def _can_copy(self, number: int, piece: UploadPart) -> bool:
        try:
            self._copy(number, piece.ranges[0])
        except InfrastructureError as error:
            log.warning("the store does not copy parts itself, reading them instead: %s", error)
            return False
        return True

    def _make(
        self,
        pieces: Sequence[UploadPart],
        digest: Any,
        on_bytes: Callable[[int], object],
        read: Read,
    ) -> None:
        data = read_in_order((part for piece in pieces for part in blocks(piece.ranges)), read)
        pending: deque[Future[None]] = deque()
        executor = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="upload")
        try:
            for number, piece in enumerate(pieces, 1):
                while len(pending) >= IN_FLIGHT:
                    pending.popleft().result()
                if piece.is_copied and number not in self._etags:
                    pending.append(executor.submit(self._copy, number, piece.ranges[0]))
                held = bytearray()
                for _ in blocks(piece.ranges):
                    block = next(data)
                    digest.update(block)
                    on_bytes(len(block))
                    if not piece.is_copied:
                        held += block
                if not piece.is_copied:
                    pending.append(executor.submit(self.upload, number, held))
            while pending:
                pending.popleft().result()
        finally:
            data.close()  # type: ignore[attr-defined]  # a generator, whose threads end here
            executor.shutdown(wait=True, cancel_futures=True)

    def _copy(self, number: int, part: ByteRange) -> None:
        reply = self._backend.call(
            "upload_part_copy",
            **self._target,
            PartNumber=number,
            CopySource=self._backend.place(part.url),
            CopySourceRange=f"bytes={part.start}-{part.end - 1}",
        )
        self._etags[number] = reply["CopyPartResult"]["ETag"]

    def upload(self, number: int, data: bytes | bytearray) -> None:
        """Make one part, numbered from 1; from any thread."""
        reply = self._backend.call("upload_part", **self._target, PartNumber=number, Body=data)
        self._etags[number] = reply["ETag"]

    def complete(self, size_bytes: int) -> None:
        """Make the object appear."""
        parts = [{"PartNumber": n, "ETag": tag} for n, tag in sorted(self._etags.items())]
        try:
            self._backend.call(
                "complete_multipart_upload", **self._target, MultipartUpload={"Parts": parts}
            )
        except FileNotFoundError:
            # An earlier attempt of this very call may have arrived although its answer was lost.
            if self._backend.size_and_version(self._url)[0] != size_bytes:
                raise

    def abort(self) -> None:
        """Leave nothing behind."""
        self._backend.call("abort_multipart_upload", **self._target)
