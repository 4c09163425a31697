"""Byte ranges of files in order, read ahead by a few threads: what hides the latency of a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile

from trainyard.artifacts import store
from trainyard.artifacts.backends.ranges import NUM_THREADS, ByteRange, blocks, read_in_order
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.links import why_absent
from trainyard.artifacts.urls import basename, local_path
from trainyard.errors import ArtifactError


def read_ahead(ranges: Iterable[ByteRange], num_threads: int = NUM_THREADS) -> Iterator[bytes]:
    """The bytes of each range, in order; as many ranges as threads are in memory.

    Raises ArtifactError for a file that is no longer in its version, or ends too soon."""
    return read_in_order(ranges, store.read_range, num_threads)


def read_whole(url: str) -> Iterator[bytes]:
    """All bytes of a file, a block at a time.

    Raises ArtifactError for a file that changes meanwhile."""
    found = store.info(url)
    return read_ahead(blocks([ByteRange(url, 0, found.size_bytes, found.version)]))


def download(url: str, target: Path) -> None:
    """Copy a file to this machine; it appears there when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=target.parent, delete=False) as copy:
        try:
            for block in read_whole(url):
                copy.write(block)
        except BaseException:
            Path(copy.name).unlink()
            raise
    Path(copy.name).replace(target)


def fetch(url: str, folder: Path) -> Path:
    """A local path with the contents of a URL: the file itself, or a copy under `folder`."""
    path = local_path(url)
    if path is not None:
        if not store.exists(url):
            raise ArtifactError(f"{url}: {why_absent(url)}")
        return path
    target = folder / f"{digest_bytes(url.encode())[:16]}-{basename(url)}"
    if not target.exists():
        download(url, target)
    return target
