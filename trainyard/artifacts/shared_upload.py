"""A large object of an S3 store that several machines make together, each parts of its own.

It is one multipart upload to the final name, and appears when all parts are there. The machines
agree on the upload as on a shared file (`shared_file`): the id in FOLDER/KEY.json is that of the
upload. All parts but the last have one size, which follows from that of the object. The store
itself copies a part that is a range of one of its objects, but for a last part under 5 MiB."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from trainyard.artifacts import store
from trainyard.artifacts.backends.multipart import MAX_PARTS, MIN_PART, MultipartUpload
from trainyard.artifacts.backends.readahead import ByteRange
from trainyard.artifacts.backends.s3 import S3Backend
from trainyard.artifacts.shared_file import agree
from trainyard.errors import ArtifactError

LEAST_PART_BYTES = 8 << 20
NUM_THREADS = 8
"""Parts that are sent or copied at once."""
IN_MEMORY_BYTES = 128 << 20
"""Of parts that are being sent: as many as fit, or one."""

Ranges = Callable[[int, int], Sequence[ByteRange]]
"""Where bytes `start` up to `end` of the object come from, in order."""


def part_bytes(size_bytes: int, block_bytes: int) -> int:
    """Of each part of an object of this size, a multiple of the blocks that are written."""
    least = max(LEAST_PART_BYTES, -(-size_bytes // MAX_PARTS))
    return -(-least // block_bytes) * block_bytes


class SharedUpload:
    """The object while it is made."""

    def __init__(self, url: str, upload_id: str, size_bytes: int, part_bytes: int) -> None:
        self.id = upload_id
        self.url = url
        self._size_bytes, self._part_bytes = size_bytes, part_bytes

    @contextmanager
    def opened(self, ranges: Ranges) -> Iterator[OpenParts]:
        """For writing whole parts."""
        with store.operation("open", self.url):
            upload = MultipartUpload(_s3(), self.url, self.id)
        out = OpenParts(upload, self.url, self._size_bytes, self._part_bytes, ranges)
        try:
            yield out
        finally:
            out.close()

    def exists(self) -> bool:
        """Whether the upload is there, and so not published yet."""
        return _exists(self.url, self.id)

    def publish(self, target_url: str, etags: Mapping[int, str]) -> None:
        """Make the object appear. etags: of all parts, by number."""
        assert target_url == self.url, target_url
        with store.operation("publish", self.url):
            upload = MultipartUpload(_s3(), self.url, self.id)
            upload.etags = dict(etags)
            upload.complete(self._size_bytes)


@dataclass(slots=True)
class _Part:
    missing: int
    """Bytes to come."""
    data: bytearray | None
    """None: the store copies this part."""


class OpenParts:
    """The upload, open for any number of threads."""

    def __init__(
        self, upload: MultipartUpload, url: str, size_bytes: int, part_bytes: int, ranges: Ranges
    ) -> None:
        self._upload, self._url, self._ranges = upload, url, ranges
        self._size_bytes, self._part_bytes = size_bytes, part_bytes
        self._lock = threading.Lock()
        self._open: dict[int, _Part] = {}
        self._may_copy: bool | None = None
        """Whether the store copies parts; None: not tried yet."""
        self._copied: dict[str, str | None] = {}
        """Versions of the sources of copies, by URL."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="upload")
        at_once = max(1, min(NUM_THREADS, IN_MEMORY_BYTES // part_bytes))
        self._memory = threading.BoundedSemaphore(at_once)
        self._pending: list[Future[None]] = []

    def write(self, start: int, data: bytes) -> None:
        """Put bytes that lie in one part at byte `start`; a part is sent when it is complete."""
        index = start // self._part_bytes
        with self._lock:
            if index not in self._open:
                self._open[index] = self._begin(index)
            part = self._open[index]
            part.missing -= len(data)
            if part.data is not None:
                at = start - index * self._part_bytes
                part.data[at : at + len(data)] = data
            if part.missing:
                return
            del self._open[index]
        if part.data is not None:
            self._memory.acquire()
            future = self._threads.submit(self._send, index + 1, part.data)
            future.add_done_callback(lambda _: self._memory.release())
            self._pending.append(future)

    def _begin(self, index: int) -> _Part:
        start = index * self._part_bytes
        end = min(start + self._part_bytes, self._size_bytes)
        source, *others = self._ranges(start, end)
        # AWS refuses ranges of objects under 5 MiB, and the last part may be all of one.
        is_short = end - start < MIN_PART
        if others or is_short or self._may_copy is False or not _s3().holds(source.url):
            return _Part(end - start, bytearray(end - start))
        if self._may_copy is None:
            with store.operation("write", self._url):
                self._may_copy = self._upload.can_copy(index + 1, source)
            if not self._may_copy:
                return _Part(end - start, bytearray(end - start))
        else:
            self._pending.append(self._threads.submit(self._copy, index + 1, source))
        self._copied[source.url] = source.version
        return _Part(end - start, None)

    def _send(self, number: int, data: bytearray) -> None:
        with store.operation("write", self._url):
            self._upload.upload(number, data)

    def _copy(self, number: int, source: ByteRange) -> None:
        with store.operation("write", self._url):
            self._upload.copy(number, source)

    def sync(self) -> dict[int, str]:
        """Return when the store has all parts written so far: their ETags, by number, of those
        since the last call.

        Raises ArtifactError for a source that changed before it was copied."""
        assert not self._open, f"{self._url}: incomplete parts {sorted(self._open)}"
        for future in self._pending:
            future.result()
        self._pending.clear()
        for url, version in self._copied.items():
            if store.info(url).version != version:
                raise ArtifactError(f"{url}: changed while it was being read")
        self._copied.clear()
        made, self._upload.etags = self._upload.etags, {}
        return made

    def close(self) -> None:
        """Wait for the parts that are being sent; those that are not yet are dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def join_in(folder_url: str, key: str, url: str, size_bytes: int, part_bytes: int) -> SharedUpload:
    """The upload that is being made under this key, begun if there is none. url: the final name."""
    upload_id = agree(
        folder_url,
        key,
        exists=lambda upload_id: _exists(url, upload_id),
        begin=lambda: _begin(url),
        discard=lambda upload_id: _abort(url, upload_id),
    )
    return SharedUpload(url, upload_id, size_bytes, part_bytes)


def abort_all(url: str) -> None:
    """Abort every incomplete upload to this name. Call it only while no other run writes there."""
    with store.operation("list", url):
        backend = _s3()
        address = backend.address(url)
        asked = {"Bucket": address["Bucket"], "Prefix": address["Key"]}
        replies = list(backend.pages("list_multipart_uploads", **asked))
    for reply in replies:
        for found in reply.get("Uploads", ()):
            if found["Key"] == address["Key"]:
                _abort(url, found["UploadId"])


def _begin(url: str) -> str:
    with store.operation("open", url):
        return MultipartUpload(_s3(), url).id


def _exists(url: str, upload_id: str) -> bool:
    with store.operation("stat", url):
        return MultipartUpload(_s3(), url, upload_id).exists()


def _abort(url: str, upload_id: str) -> None:
    with store.operation("delete", url), suppress(FileNotFoundError):
        MultipartUpload(_s3(), url, upload_id).abort()


def _s3() -> S3Backend:
    return S3Backend("s3")
