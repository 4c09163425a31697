"""Parts of an upload: laws of the plan, and objects that a store copies together by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.artifacts.backends.test_fast_copy import put
from trainyard.artifacts import store
from trainyard.artifacts.backends import multipart
from trainyard.artifacts.backends.multipart import MAX_PART, MIN_PART, plan_parts
from trainyard.artifacts.backends.readahead import ByteRange
from trainyard.artifacts.backends.s3 import S3Backend
from trainyard.artifacts.digest import digest_bytes
from trainyard.errors import ArtifactError, InfrastructureError

pytestmark = pytest.mark.slow

SIZES = st.one_of(
    st.integers(0, 3 * MIN_PART),
    st.sampled_from([MIN_PART - 1, MIN_PART, MIN_PART + 1, 2 * MIN_PART - 1]),
    st.integers(0, 40 << 30),
)


@settings(max_examples=200, deadline=None)
@given(
    files=st.lists(st.tuples(SIZES, st.booleans()), max_size=12),
    copy_bytes=st.sampled_from([2 * MIN_PART, 128 << 20, MAX_PART]),
    upload_bytes=st.sampled_from([16 << 20, 1 << 30]),
)
def test_parts_cover_everything_in_order_and_obey_the_store(
    files: list[tuple[int, bool]], copy_bytes: int, upload_bytes: int
) -> None:
    ranges = [
        (ByteRange(str(n), 0, size), can_copy) for n, (size, can_copy) in enumerate(files) if size
    ]
    pieces = plan_parts(ranges, copy_bytes, upload_bytes)
    at = dict.fromkeys((part.url for part, _ in ranges), 0)
    order = []
    for piece in pieces:
        for part in piece.ranges:
            assert part.start == at[part.url] < part.end
            at[part.url] = part.end
            order.append(int(part.url))
        assert not piece.is_copied or (len(piece.ranges) == 1 and files[order[-1]][1])
    assert order == sorted(order)
    assert at == {part.url: part.end for part, _ in ranges}
    sizes = [sum(part.end - part.start for part in piece.ranges) for piece in pieces]
    assert all(MIN_PART <= size <= MAX_PART for size in sizes[:-1])
    assert all(size <= max(upload_bytes, copy_bytes) for size in sizes)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls of the store."""
    made: list[str] = []
    call = S3Backend.call

    def noted(self: S3Backend, method: str, **arguments: Any) -> Any:
        made.append(method)
        return call(self, method, **arguments)

    monkeypatch.setattr(S3Backend, "call", noted)
    return made


def test_the_store_copies_what_it_holds(
    s3_url: str, tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "COPY_BYTES", 2 * MIN_PART)
    sources = [
        put(store.join(s3_url, "a"), os.urandom(13 << 20)),
        put(store.join(s3_url, "b"), os.urandom(1000)),
        put(store.join(s3_url, "c"), os.urandom(11 << 20)),
        put(str(tmp_path / "d"), os.urandom(1001)),
    ]
    expected = b"".join(store.read_bytes(source.url) for source in sources)
    told: list[int] = []
    del calls[:]
    with store.open_output(store.join(s3_url, "all")) as out:
        out.append_files(sources, told.append)
        assert not store.exists(out.url)
    # a in two, then b with the head of c, the rest of c, d
    assert calls.count("upload_part_copy") == 3
    assert calls.count("upload_part") == 2
    assert store.read_bytes(out.url) == expected
    assert out.record.digest == digest_bytes(expected)
    assert sum(told) == out.record.size_bytes == len(expected)


def test_a_store_that_does_not_copy_is_read(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call = S3Backend.call

    def unable(self: S3Backend, method: str, **arguments: Any) -> Any:
        if method == "upload_part_copy":
            raise InfrastructureError("the store refused upload_part_copy: NotImplemented")
        return call(self, method, **arguments)

    monkeypatch.setattr(S3Backend, "call", unable)
    sources = [put(store.join(s3_url, name), os.urandom(9 << 20)) for name in "ab"]
    with store.open_output(store.join(s3_url, "all")) as out:
        out.append_files(sources)
    assert store.read_bytes(out.url) == b"".join(store.read_bytes(s.url) for s in sources)
    assert "does not copy parts itself" in caplog.text


def test_nothing_is_left_of_a_copy_that_fails(s3_url: str, calls: list[str]) -> None:
    source = put(store.join(s3_url, "a"), os.urandom(6 << 20))
    store.write_bytes(source.url, os.urandom(6 << 20))
    with (
        pytest.raises(ArtifactError, match="changed while it was being read"),
        store.open_output(store.join(s3_url, "all")) as out,
    ):
        out.append_files([source])
    assert calls[-1] == "abort_multipart_upload"
    assert not store.exists(out.url)


def test_an_answer_that_was_lost_counts(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = S3Backend.call

    def twice(self: S3Backend, method: str, **arguments: Any) -> Any:
        if method == "complete_multipart_upload":
            call(self, method, **arguments)
        return call(self, method, **arguments)

    source = put(store.join(s3_url, "a"), os.urandom(6 << 20))
    monkeypatch.setattr(S3Backend, "call", twice)
    with store.open_output(store.join(s3_url, "all")) as out:
        out.append_files([source])
    assert store.read_bytes(out.url) == store.read_bytes(source.url)
