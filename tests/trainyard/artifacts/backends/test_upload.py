"""Objects on their way into an S3 store: in one put or in parts, never half there."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from trainyard.artifacts import store
from trainyard.artifacts.backends import multipart, s3
from trainyard.artifacts.backends.multipart import MAX_PART, MAX_PARTS, MIN_PART
from trainyard.artifacts.backends.s3 import S3Backend
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.inputs import read_digest
from trainyard.errors import InfrastructureError


class Calls:
    """What a store is asked, in order, and how many parts are on their way at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.most = self._now = 0
        self.meet = threading.Barrier(1)
        """Parts on their way wait until there are so many."""
        self.refused = ""
        self._lock = threading.Lock()
        call = S3Backend.call

        def noted(backend: S3Backend, method: str, **arguments: Any) -> Any:
            with self._lock:
                self.made.append(method)
                self._now += method == "upload_part"
                self.most = max(self.most, self._now)
            try:
                if method == "upload_part":
                    self.meet.wait(30)
                if method == self.refused and arguments.get("PartNumber") != 1:
                    raise InfrastructureError(f"the store refused {method}")
                return call(backend, method, **arguments)
            finally:
                with self._lock:
                    self._now -= method == "upload_part"

        monkeypatch.setattr(S3Backend, "call", noted)


@pytest.fixture
def calls(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of the store, and parts as small as it takes."""
    monkeypatch.setattr(multipart, "PART_BYTES", MIN_PART)
    return Calls(monkeypatch)


def unfinished(url: str) -> int:
    """Uploads in the folder that were neither completed nor aborted."""
    place = S3Backend("s3").address(url)
    reply = S3Backend("s3").call(
        "list_multipart_uploads", Bucket=place["Bucket"], Prefix=place["Key"]
    )
    return len(reply.get("Uploads", ()))


def test_parts_are_as_a_store_takes_them_and_hold_terabytes() -> None:
    sizes = [multipart.part_bytes(number) for number in range(1, MAX_PARTS + 1)]
    assert MIN_PART <= sizes[0] == multipart.PART_BYTES
    assert sizes == sorted(sizes)
    assert sizes[-1] <= MAX_PART
    assert sum(sizes) > 2e12
    assert sum(sizes[:1000]) > 16e9
    assert sizes[1000] < 32 << 20  # little memory for usual sizes


@pytest.mark.parametrize("size", [0, 1, MIN_PART - 1])
def test_what_is_shorter_than_a_part_is_one_put(calls: Calls, s3_url: str, size: int) -> None:
    data = os.urandom(size)
    record = store.write_bytes(store.join(s3_url, "a"), data)
    assert calls.made == ["put_object"]
    assert store.read_bytes(store.join(s3_url, "a")) == data
    assert (record.size_bytes, record.digest) == (size, digest_bytes(data))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("size", [MIN_PART, 2 * MIN_PART, 4 * MIN_PART + 1])
def test_the_rest_is_sent_in_parts_some_at_once(calls: Calls, s3_url: str, size: int) -> None:
    data = os.urandom(size)
    with store.open_output(store.join(s3_url, "a")) as out:
        for start in range(0, size, 1 << 20):
            out.write(data[start : start + (1 << 20)])
        assert not store.exists(out.url)
    assert calls.made.count("upload_part") == -(-size // MIN_PART)
    assert calls.most <= multipart.PARTS_IN_FLIGHT
    assert store.read_bytes(out.url) == data
    assert read_digest(out.url) == out.record.digest == digest_bytes(data)


def test_for_several_writers_as_many_parts_are_sent_at_once(calls: Calls, s3_url: str) -> None:
    data = os.urandom(8 * MIN_PART)
    calls.meet = threading.Barrier(2 * multipart.PARTS_IN_FLIGHT)
    with store.open_output(store.join(s3_url, "a")) as out:
        out.write_for(2)
        for start in range(0, len(data), MIN_PART):
            out.write(data[start : start + MIN_PART])
    assert calls.most == 2 * multipart.PARTS_IN_FLIGHT
    assert store.read_bytes(out.url) == data


def test_nothing_is_left_of_what_is_dropped(calls: Calls, s3_url: str) -> None:
    out = store.open_output(store.join(s3_url, "a"))
    out.write(bytes(3 * MIN_PART))
    out.__exit__(RuntimeError, RuntimeError("the writer failed"), None)
    assert calls.made[-1] == "abort_multipart_upload"
    assert not store.exists(out.url)
    assert unfinished(s3_url) == 0


def test_a_part_that_fails_fails_the_file(calls: Calls, s3_url: str) -> None:
    calls.refused = "upload_part"
    url = store.join(s3_url, "a")
    with pytest.raises(InfrastructureError, match="refused upload_part"):
        store.write_bytes(url, bytes(4 * MIN_PART))
    assert "complete_multipart_upload" not in calls.made
    assert not store.exists(url)
    assert unfinished(s3_url) == 0


def test_listing_and_removing_go_page_by_page(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{i}/{j}" for i in range(3) for j in range(3)] + ["x", "y", "z"]
    for name in names:
        store.write_bytes(store.join(s3_url, "all", name), name.encode())
    store.write_bytes(store.join(s3_url, "all-others"), b"1")
    call = S3Backend.call

    def by_twos(self: S3Backend, method: str, **arguments: Any) -> Any:
        more = {"MaxKeys": 2} if method == "list_objects_v2" else {}
        return call(self, method, **arguments, **more)

    monkeypatch.setattr(S3Backend, "call", by_twos)
    monkeypatch.setattr(s3, "DELETED_AT_ONCE", 5)
    folder = store.join(s3_url, "all")
    assert list(store.list_files(folder)) == sorted(names)
    assert store.list_folder(folder) == {"x": 1, "y": 1, "z": 1}
    store.delete_tree(folder)
    assert list(store.list_files(s3_url)) == ["all-others"]
