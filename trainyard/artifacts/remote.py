"""Objects behind fsspec URLs: s3:// and whatever else fsspec knows.

Reading and whole-object writing go through fsspec. Conditional writes are a direct call of the S3
client, because stores answer a lost race in different words and only the HTTP status is common to
all."""

# ruff: noqa: D102 (what the methods do is written in `backend`)

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, BinaryIO

from trainyard.artifacts.backend import SourceFile
from trainyard.artifacts.multipart import MIN_PART, MultipartUpload
from trainyard.artifacts.urls import basename, join
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError

LOST_RACE = (412, 409)
"""Precondition failed; and the conflict that AWS answers while another conditional write is in
flight."""

ATTEMPTS = 3

S3 = ("s3", "s3a")
S3_OPTIONS = {
    "use_listings_cache": False,  # another process of ours writes while we look
    # A store that does not answer is said so within a minute or two, not within five.
    "config_kwargs": {
        "connect_timeout": 5,
        "read_timeout": 20,
        "retries": {"mode": "standard", "max_attempts": 2},
    },
}


@lru_cache(maxsize=8)
def _filesystem(protocol: str, process: int) -> Any:
    """One for each process: its thread and its connections do not survive a fork."""
    import fsspec

    try:
        filesystem = fsspec.filesystem(protocol, **(S3_OPTIONS if protocol in S3 else {}))
        if protocol in S3:
            filesystem.retries = 2  # times the client's own attempts
        return filesystem
    except ImportError as error:
        raise ConfigError(
            f"{protocol}:// needs a package that is not installed: {error}"
            + ("; trainyard's extra [s3] brings it" if protocol in S3 else "")
        ) from error
    except ValueError as error:
        raise ConfigError(f"{protocol}:// is not a kind of storage that fsspec knows") from error


class RemoteBackend:
    """One of the two kinds of store behind `artifacts.store`."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self.fs = _filesystem(protocol, os.getpid())

    def open_input(self, url: str) -> BinaryIO:
        file: BinaryIO = self.fs.open(url, "rb", block_size=2**23)
        return file

    def open_output(self, url: str) -> RemoteWriter:
        return RemoteWriter(self, url, self.fs.open(url, "wb", block_size=2**24))

    def holds(self, url: str) -> bool:
        """True for an object that this store could copy by itself."""
        return self.protocol in S3 and url.partition("://")[0] in S3

    def read_range(self, url: str, start: int, end: int, version: str | None) -> bytes:
        if self.protocol not in S3:
            return bytes(self.fs.cat_file(url, start=start, end=end))
        bucket, key, _ = self.fs.split_path(url)
        reply = self.call("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        if version is not None and reply["ETag"].strip('"') != version.strip('"'):
            raise ArtifactError(f"{url}: changed while it was being read")
        return bytes(reply["Data"])

    def size_and_version(self, url: str) -> tuple[int, str]:
        info = self.fs.info(url)
        if info["type"] != "file":
            raise FileNotFoundError(url)
        return int(info["size"]), str(
            info.get("ETag") or info.get("LastModified") or info.get("created")
        )

    def is_file(self, url: str) -> bool:
        # fs.isfile would take every fault of the store for "no".
        try:
            return bool(self.fs.info(url)["type"] == "file")
        except FileNotFoundError:
            return False

    def list_files(self, url: str) -> dict[str, int]:
        root = self.fs._strip_protocol(url).rstrip("/") + "/"
        try:
            found = self.fs.find(root, detail=True)
        except FileNotFoundError as error:
            _refuse_missing_bucket(error)
            return {}
        return {
            name[len(root) :]: int(found[name]["size"]) for name in sorted(found) if name != root
        }

    def list_folder(self, url: str) -> dict[str, int]:
        try:
            found = self.fs.ls(url, detail=True)
        except FileNotFoundError as error:
            _refuse_missing_bucket(error)
            return {}
        files = (entry for entry in found if entry["type"] == "file")
        return dict(sorted((basename(entry["name"]), int(entry["size"])) for entry in files))

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
        # Copied manifest last, removed manifest first: neither is ever a whole that is not one.
        names = sorted(self.list_files(source), key=lambda name: name.endswith("manifest.json"))
        for name in names:
            self.fs.copy(join(source, name), join(target, name))
        for name in reversed(names):
            self.fs.rm_file(join(source, name))

    # --- conditional writes ---------------------------------------------------------------

    def read_version(self, url: str) -> tuple[bytes, str]:
        if self.protocol not in S3:
            return self.fs.cat_file(url), self.size_and_version(url)[1]
        bucket, key, _ = self.fs.split_path(url)
        reply = self.call("get_object", Bucket=bucket, Key=key)
        return reply["Data"], str(reply["ETag"])

    def put_if_absent(self, url: str, data: bytes) -> str | None:
        return self._conditional_put(url, data, IfNoneMatch="*")

    def replace_if_match(self, url: str, data: bytes, version: str) -> str | None:
        # ETags are quoted, and most stores want them back so; Ceph RGW compares the bare digest.
        # Where the quoted one is refused although nothing changed, the bare one is what counts.
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
        if self.protocol not in S3:
            raise ConfigError(
                f"{url}: trainyard publishes by conditional writes, which it knows for s3:// and "
                f"for file systems, not for {self.protocol}://; use one of those for outputs"
            )
        bucket, key, _ = self.fs.split_path(url)
        reply = self.call("put_object", Bucket=bucket, Key=key, Body=data, **condition)
        if reply is not None:
            return str(reply["ETag"])
        # An earlier attempt of this very call may have arrived although its answer was lost.
        try:
            current, version = self.read_version(url)
        except FileNotFoundError:
            return None
        return version if current == data else None

    def call(self, method: str, **arguments: Any) -> Any:
        """One client call: None for a lost race, FileNotFoundError for an absent key."""
        from botocore.exceptions import (
            ClientError,
            ConnectionError,
            HTTPClientError,
            IncompleteReadError,
        )
        from fsspec.asyn import sync

        async def call() -> Any:
            await self.fs.set_session()
            client = await self.fs.get_s3(arguments["Bucket"])
            reply = await getattr(client, method)(**arguments)
            if "Body" in reply:
                async with reply["Body"] as body:
                    reply["Data"] = await body.read()
            return reply

        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            try:
                return sync(self.fs.loop, call)
            except ClientError as error:
                status = int(error.response["ResponseMetadata"].get("HTTPStatusCode", 0))
                if status == 409 and not last:
                    continue
                if status in LOST_RACE or (status == 404 and "IfMatch" in arguments):
                    return None
                if status == 404:
                    missing = FileNotFoundError(str(error))
                    _refuse_missing_bucket(missing)
                    raise missing from error
                if status == 416:
                    raise ArtifactError(f"{arguments['Key']}: shorter than it was") from error
                if status == 403:
                    raise PermissionError(str(error)) from error
                if status < 500 or last:
                    raise InfrastructureError(f"the store refused {method}: {error}") from error
            except (ConnectionError, HTTPClientError, IncompleteReadError) as error:
                if last:
                    raise InfrastructureError(f"the store cannot be reached: {error}") from error
        raise AssertionError("unreachable")

    def honours_conditions(self, folder_url: str) -> bool:
        """Write the same key twice with If-None-Match; an honest store refuses the second."""
        url = join(folder_url, f".tmp-probe-{uuid.uuid4().hex[:12]}")
        try:
            first = self._conditional_put(url, b"1", IfNoneMatch="*")
            second = self._conditional_put(url, b"2", IfNoneMatch="*")
            stale = self._conditional_put(url, b"3", IfMatch='"00000000000000000000000000000000"')
        finally:
            self.delete(url)
        return first is not None and second is None and stale is None


def _refuse_missing_bucket(error: FileNotFoundError) -> None:
    """A bucket that is not there is not an empty one."""
    if "bucket does not exist" in str(error) or "NoSuchBucket" in str(error):
        raise ConfigError(
            "the bucket does not exist at this endpoint; create it, or check the URL and "
            "AWS_ENDPOINT_URL"
        ) from error


class RemoteWriter:
    """An upload that becomes an object when it is complete, and only then."""

    def __init__(self, backend: RemoteBackend, url: str, file: Any) -> None:
        self.backend = backend
        self.url = url
        self.file = file
        self.upload: MultipartUpload | None = None

    def write(self, data: memoryview) -> int:
        assert self.upload is None, "files were appended: nothing can follow them"
        return int(self.file.write(data))

    def append_files(
        self, sources: Sequence[SourceFile], digest: Any, on_bytes: Callable[[int], object]
    ) -> bool:
        small = sum(source.size_bytes for source in sources) < MIN_PART
        if small or self.backend.protocol not in S3 or self.file.tell():
            return False
        self.upload = MultipartUpload(self.backend, self.url)
        self.upload.fill(sources, digest, on_bytes)
        return True

    def publish(self) -> None:
        if self.upload is None:
            self.file.close()
            return
        self.upload.complete()
        self._drop_file()

    def discard(self) -> None:
        with quiet():
            if self.upload is not None:
                self.upload.abort()
        with quiet():
            self._drop_file()

    def _drop_file(self) -> None:
        if not self.file.closed:
            self.file.discard()
        self.file.closed = True


@contextmanager
def quiet() -> Iterator[None]:
    """For a clean-up on the way out of another error, which must not be hidden by this one."""
    try:
        yield
    except Exception as error:
        import logging

        logging.getLogger(__name__).warning("could not clean up: %s", error)
