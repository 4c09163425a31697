"""Stores behind fsspec URLs."""

# ruff: noqa: D102 (`base` documents these methods)

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, BinaryIO, NoReturn

from trainyard.artifacts.backends.base import Writer, log_failure
from trainyard.artifacts.backends.s3_client import CONFIG, refuse_missing_bucket
from trainyard.artifacts.urls import basename, join
from trainyard.errors import ArtifactError, ConfigError

S3 = ("s3", "s3a")
S3_OPTIONS = {
    "use_listings_cache": False,  # other processes write at the same time
    "config_kwargs": CONFIG,
}

NO_STORES = frozenset({"async_wrapper", "asyncwrapper", "data", "dir", "ftp", "generic"})
NO_STORES |= {"libarchive", "local", "reference", "tar", "zip"}
"""What fsspec knows beside stores: files of this machine by another name, and what needs more than
a URL, such as a host or another file system."""
NO_STORES_RULE = "give a path, or the URL of an object in a store, such as s3://BUCKET/KEY"


@lru_cache(maxsize=8)
def _filesystem(protocol: str, process: int) -> Any:
    """One per process: its thread and connections do not survive a fork."""
    import fsspec

    if protocol in NO_STORES:
        raise ConfigError(f"{protocol}:// is not a store; {NO_STORES_RULE}")
    try:
        filesystem = fsspec.filesystem(protocol, **(S3_OPTIONS if protocol in S3 else {}))
        if protocol in S3:
            filesystem.retries = 2  # each with the client's own attempts
        return filesystem
    except ImportError as error:
        raise ConfigError(
            f"{protocol}:// needs a package that is not installed: {error}"
            + ("; run `pip install '.[s3]'` in the checkout" if protocol in S3 else "")
        ) from error
    except TypeError as error:  # an argument is missing, such as a host
        raise ConfigError(f"{protocol}:// needs more than a URL; {NO_STORES_RULE}") from error
    except ValueError as error:
        raise ConfigError(f"{protocol}:// is not a storage protocol that fsspec knows") from error


class FsspecWriter(Writer):
    """A file of an fsspec file system."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: memoryview) -> int:
        return int(self._file.write(data))

    def publish(self) -> None:
        self._file.close()

    def discard(self) -> None:
        with log_failure():
            if not self._file.closed:
                self._file.discard()
            self._file.closed = True


class FsspecBackend:
    """Any file system of fsspec."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol

    @property
    def fs(self) -> Any:
        """The file system; its packages are imported on first use."""
        return _filesystem(self.protocol, os.getpid())

    def open_input(self, url: str) -> BinaryIO:
        file: BinaryIO = self.fs.open(url, "rb", block_size=2**23)
        return file

    def open_output(self, url: str) -> Writer:
        return FsspecWriter(self.fs.open(url, "wb", block_size=2**24))

    def read_range(self, url: str, start: int, end: int, version: str | None) -> bytes:
        return bytes(self.fs.cat_file(url, start=start, end=end))

    def size_and_version(self, url: str) -> tuple[int, str]:
        info = self.fs.info(url)
        if info["type"] != "file":
            raise FileNotFoundError(url)
        if info["size"] is None:
            raise ArtifactError(f"{url}: the store does not give its size; use a copy of it")
        return _size_and_version(info)

    def is_file(self, url: str) -> bool:
        # fs.isfile returns False for every error of the store.
        try:
            return bool(self.fs.info(url)["type"] == "file")
        except FileNotFoundError:
            return False

    def list_files(self, url: str) -> dict[str, int]:
        root = self.fs._strip_protocol(url).rstrip("/") + "/"
        try:
            found = self.fs.find(root, detail=True)
        except FileNotFoundError as error:
            refuse_missing_bucket(error, url)
            return {}
        return {
            name[len(root) :]: int(found[name]["size"] or 0)
            for name in sorted(found)
            if name != root
        }

    def list_folder(self, url: str) -> dict[str, tuple[int, str]]:
        try:
            found = self.fs.ls(url, detail=True)
        except FileNotFoundError as error:
            refuse_missing_bucket(error, url)
            return {}
        files = (entry for entry in found if entry["type"] == "file")
        return dict(sorted((basename(entry["name"]), _size_and_version(entry)) for entry in files))

    def list_subfolders(self, url: str) -> list[str]:
        try:
            found = self.fs.ls(url, detail=True)
        except FileNotFoundError as error:
            refuse_missing_bucket(error, url)
            return []
        return sorted(basename(entry["name"]) for entry in found if entry["type"] == "directory")

    def glob(self, url: str) -> list[str]:
        return sorted(f"{self.protocol}://{name}" for name in self.fs.glob(url))

    def delete(self, url: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(url)

    def delete_tree(self, url: str) -> None:
        names = list(self.list_files(url))
        if names:
            self.fs.rm([join(url, name) for name in names])

    def move_tree(self, source: str, target: str) -> None:
        # Copy the manifest last and remove it first: neither folder ever looks complete in part.
        names = sorted(self.list_files(source), key=lambda name: name.endswith("manifest.json"))
        for name in names:
            self.fs.copy(join(source, name), join(target, name))
        for name in reversed(names):
            self.fs.rm_file(join(source, name))

    def read_document(self, url: str) -> bytes:
        return self.read_version(url)[0]

    def read_version(self, url: str) -> tuple[bytes, str]:
        return self.fs.cat_file(url), self.size_and_version(url)[1]

    def put_if_absent(self, url: str, data: bytes) -> str | None:
        self._cannot(url)

    def replace_if_match(self, url: str, data: bytes, version: str) -> str | None:
        self._cannot(url)

    def honours_conditions(self, folder_url: str) -> bool:
        self._cannot(folder_url)

    def _cannot(self, url: str) -> NoReturn:
        raise ConfigError(
            f"{url}: trainyard publishes with conditional writes, which it supports for s3:// and "
            f"file systems, not for {self.protocol}://; use one of those for outputs"
        )


def _size_and_version(info: Mapping[str, Any]) -> tuple[int, str]:
    version = info.get("ETag") or info.get("LastModified") or info.get("created") or ""
    return int(info["size"] or 0), str(version)
