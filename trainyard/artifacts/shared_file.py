"""A large file that several machines write together, each ranges of its own.

It is made under another name, in a folder beside its place, and appears when all ranges are there.
The machines agree on it by a small document that the first one creates:

    FOLDER/KEY.json     {"id": ID}
    FOLDER/KEY.ID       the file, of its full size from the start

Whoever finds KEY.json without the file, since it was published or removed, begins another with
another id. So ranges that were written to different files are told apart by the id.
`shared_upload` is the same for an object."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainyard.artifacts import store
from trainyard.artifacts.conditional import put_if_absent, read_version, replace_if_match
from trainyard.artifacts.strict_json import parse_json
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError

ID = re.compile(r"[^\s/\\]{1,1024}")
"""Of a file, whose name has it, or of an upload: no path."""


class SharedFile:
    """The file while it is made; on a file system that all machines see."""

    def __init__(self, folder_url: str, key: str, file_id: str) -> None:
        self.id = file_id
        self.url = join(folder_url, f"{key}.{file_id}")

    @property
    def path(self) -> Path:
        """Where it is."""
        path = store.local_path(self.url)
        assert path is not None, f"{self.url} is not on a file system"
        return path

    @contextmanager
    def opened(self, ranges: Callable[[int, int], Sequence[object]]) -> Iterator[OpenRanges]:
        """For writing ranges. ranges: where bytes come from; not used here."""
        with store.operation("open", self.url):
            file = os.open(self.path, os.O_WRONLY)
        try:
            yield OpenRanges(self.url, file)
        finally:
            os.close(file)

    def exists(self) -> bool:
        """Whether it is there, and so not published yet."""
        return store.exists(self.url)

    def publish(self, target_url: str, etags: Mapping[int, str]) -> None:
        """Give it its final name; nothing is copied. etags: what `sync` gave, so nothing."""
        target = store.local_path(target_url)
        assert target is not None, target_url
        with store.operation("publish", target_url):
            os.replace(self.path, target)
            for folder in {target.parent, self.path.parent}:
                _sync(folder)


class OpenRanges:
    """The file, open for any number of threads."""

    def __init__(self, url: str, file: int) -> None:
        self._url, self._file = url, file

    def write(self, start: int, data: bytes) -> None:
        """Put bytes at byte `start`."""
        view = memoryview(data)
        with store.operation("write", self._url):
            while view:
                count = os.pwrite(self._file, view, start)
                view, start = view[count:], start + count

    def sync(self) -> dict[int, str]:
        """Return when all bytes written so far are on the disk; a file has no ETags of parts."""
        with store.operation("write", self._url):
            os.fsync(self._file)
        return {}


def join_in(folder_url: str, key: str, size_bytes: int) -> SharedFile:
    """The file that is being made under this key, begun if there is none."""

    def begin() -> str:
        file = SharedFile(folder_url, key, uuid.uuid4().hex[:12])
        _begin(file, size_bytes)
        return file.id

    file_id = agree(
        folder_url,
        key,
        exists=lambda file_id: SharedFile(folder_url, key, file_id).exists(),
        begin=begin,
        discard=lambda file_id: store.delete(SharedFile(folder_url, key, file_id).url),
    )
    return SharedFile(folder_url, key, file_id)


def agree(
    folder_url: str,
    key: str,
    exists: Callable[[str], bool],
    begin: Callable[[], str],
    discard: Callable[[str], None],
) -> str:
    """The id in KEY.json, if what it names exists. Otherwise begins one and returns its id; if
    another machine was first, discards ours and returns the other's."""
    agreed_url = join(folder_url, f"{key}.json")
    while True:
        found = read_version(agreed_url)
        if found is not None and exists(agreed := _id_in(found[0], agreed_url)):
            return agreed
        ours = begin()
        document = json.dumps({"id": ours}).encode()
        if found is None:
            is_ours = put_if_absent(agreed_url, document) is not None
        else:
            is_ours = replace_if_match(agreed_url, document, found[1]) is not None
        if is_ours:
            return ours
        discard(ours)


def _begin(file: SharedFile, size_bytes: int) -> None:
    with store.operation("open", file.url):
        file.path.parent.mkdir(parents=True, exist_ok=True)
        with file.path.open("xb") as empty:
            empty.truncate(size_bytes)
            os.fsync(empty.fileno())
        _sync(file.path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _id_in(data: bytes, url: str) -> str:
    document = parse_json(data, url)
    found = document.get("id") if isinstance(document, dict) else None
    if not isinstance(found, str) or not ID.fullmatch(found):
        raise ArtifactError(f"{url}: not the description of a file that is being made; remove it")
    return found
