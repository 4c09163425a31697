"""Objects of an S3 store, by direct calls of its API; s3fs does the rare operations."""

# ruff: noqa: D102 (`base` documents these methods)

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from trainyard.artifacts.backends import s3_client
from trainyard.artifacts.backends.base import Writer
from trainyard.artifacts.backends.fsspec import S3, FsspecBackend
from trainyard.artifacts.backends.multipart import S3Writer
from trainyard.artifacts.backends.readahead import open_ranged
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError

DELETED_AT_ONCE = 1000
"""Keys that one request may name."""

NEXT_PAGE = {
    "list_objects_v2": {"ContinuationToken": "NextContinuationToken"},
    "list_multipart_uploads": {
        "KeyMarker": "NextKeyMarker",
        "UploadIdMarker": "NextUploadIdMarker",
    },
    "list_parts": {"PartNumberMarker": "NextPartNumberMarker"},
}
"""Per listing: the argument that asks for the next page, and the reply field that gives it."""


class S3Backend(FsspecBackend):
    """An S3 store."""

    def call(self, method: str, **arguments: Any) -> Any:
        """One call of the store: None for a lost race, FileNotFoundError for an absent key."""
        return s3_client.call(method, **arguments)

    def address(self, url: str) -> dict[str, str]:
        """Bucket and key, as arguments of a call."""
        rest = url.partition("://")[2]
        if rest.startswith("arn:"):  # the name of an access point contains slashes
            bucket, key, _ = self.fs.split_path(url)
        else:
            bucket, _, key = rest.partition("/")
        if not bucket:
            raise ConfigError(f"{url} does not name a bucket; write {self.protocol}://BUCKET/KEY")
        return {"Bucket": bucket, "Key": key}

    def folder(self, url: str) -> dict[str, str]:
        """Bucket and prefix of a folder, as arguments of a listing."""
        address = self.address(url)
        root = address["Key"].rstrip("/")
        return {"Bucket": address["Bucket"], "Prefix": root + "/" if root else ""}

    def pages(self, method: str, **asked: Any) -> Iterator[Any]:
        """The replies of a listing, page by page."""
        is_cut = True
        while is_cut:
            reply = self.call(method, **asked)
            yield reply
            is_cut = bool(reply.get("IsTruncated"))
            if is_cut:
                asked |= {name: reply[field] for name, field in NEXT_PAGE[method].items()}

    def open_input(self, url: str) -> BinaryIO:
        return open_ranged(self, url, *self.size_and_version(url))

    def open_output(self, url: str) -> Writer:
        return S3Writer(self, url)

    def holds(self, url: str) -> bool:
        """True for an object that this store can copy itself."""
        return url.partition("://")[0] in S3

    def read_range(self, url: str, start: int, end: int, version: str | None) -> bytes:
        reply = self.call("get_object", **self.address(url), Range=f"bytes={start}-{end - 1}")
        if version is not None and reply["ETag"].strip('"') != version.strip('"'):
            raise ArtifactError(f"{url}: changed while it was being read")
        return bytes(reply["Data"])

    def _head(self, url: str) -> Any:
        address = self.address(url)
        try:
            return self.call("head_object", **address) if address["Key"] else None
        except FileNotFoundError:
            return None

    def size_and_version(self, url: str) -> tuple[int, str]:
        head = self._head(url)
        if head is None:
            return super().size_and_version(url)  # its error says whether the bucket is missing
        return int(head["ContentLength"]), str(head["ETag"])

    def is_file(self, url: str) -> bool:
        return self._head(url) is not None

    def list_files(self, url: str) -> dict[str, int]:
        return {name: size_bytes for name, (size_bytes, _) in self._listed(url)}

    def list_folder(self, url: str) -> dict[str, tuple[int, str]]:
        return dict(self._listed(url, Delimiter="/"))

    def list_subfolders(self, url: str) -> list[str]:
        folder = self.folder(url)
        replies = self.pages("list_objects_v2", **folder, Delimiter="/")
        found = [entry["Prefix"] for reply in replies for entry in reply.get("CommonPrefixes", ())]
        return sorted(prefix[len(folder["Prefix"]) :].removesuffix("/") for prefix in found)

    def _listed(self, url: str, **how: str) -> list[tuple[str, tuple[int, str]]]:
        """Name relative to the folder, size and version; sorted."""
        folder, found = self.folder(url), {}
        for reply in self.pages("list_objects_v2", **folder, **how):
            for entry in reply.get("Contents", ()):
                if not entry["Key"].endswith("/"):  # a folder marker of some tools
                    name = entry["Key"][len(folder["Prefix"]) :]
                    found[name] = (int(entry["Size"]), str(entry["ETag"]))
        return sorted(found.items())

    def delete(self, url: str) -> None:
        with suppress(FileNotFoundError):
            self.call("delete_object", **self.address(url))

    def delete_tree(self, url: str) -> None:
        keys = [{"Key": self.address(join(url, name))["Key"]} for name in self.list_files(url)]
        bucket = self.address(url)["Bucket"]
        for first in range(0, len(keys), DELETED_AT_ONCE):
            some = {"Objects": keys[first : first + DELETED_AT_ONCE], "Quiet": True}
            reply = self.call("delete_objects", Bucket=bucket, Delete=some)
            for fault in reply.get("Errors", ()):
                raise InfrastructureError(f"the store did not delete {fault}")

    # --- conditional writes ---------------------------------------------------------------

    def read_version(self, url: str) -> tuple[bytes, str]:
        reply = self.call("get_object", **self.address(url))
        return reply["Data"], str(reply["ETag"])

    def put_if_absent(self, url: str, data: bytes) -> str | None:
        return self._conditional_put(url, data, IfNoneMatch="*")

    def replace_if_match(self, url: str, data: bytes, version: str) -> str | None:
        # ETags are quoted, and most stores expect the quotes; Ceph RGW compares the bare digest.
        # If the quoted one is refused although nothing changed, try the bare one.
        replaced = self._conditional_put(url, data, IfMatch=version)
        if replaced is None and version.startswith('"') and self._version_now(url) == version:
            return self._conditional_put(url, data, IfMatch=version.strip('"'))
        return replaced

    def _version_now(self, url: str) -> str | None:
        try:
            return self.read_version(url)[1]
        except FileNotFoundError:
            return None

    def _conditional_put(self, url: str, data: bytes, **condition: str) -> str | None:
        reply = self.call("put_object", **self.address(url), Body=data, **condition)
        if reply is not None:
            return str(reply["ETag"])
        # An earlier attempt of this call may have succeeded although its answer was lost.
        try:
            current, version = self.read_version(url)
        except FileNotFoundError:
            return None
        return version if current == data else None

    def honours_conditions(self, folder_url: str) -> bool:
        """Write one key twice with If-None-Match; a store that honours it refuses the second."""
        url = join(folder_url, f".tmp-probe-{uuid.uuid4().hex[:12]}")
        try:
            first = self._conditional_put(url, b"1", IfNoneMatch="*")
            second = self._conditional_put(url, b"2", IfNoneMatch="*")
            stale = self._conditional_put(url, b"3", IfMatch='"00000000000000000000000000000000"')
        finally:
            self.delete(url)
        return first is not None and second is None and stale is None
