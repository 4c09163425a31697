"""Files appended to a file, in every way that a kernel may offer: the same bytes and digest."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.artifacts import store
from trainyard.artifacts.backends import fast_copy
from trainyard.artifacts.digest import LARGE, digest_bytes, hasher
from trainyard.artifacts.store import SourceFile
from trainyard.errors import ArtifactError, InfrastructureError

BLOCK = 4 * fast_copy.ALIGNMENT

SIZES = st.lists(
    st.one_of(
        st.integers(0, 3 * BLOCK),
        st.integers(0, 6).map(lambda n: n * fast_copy.ALIGNMENT),
        st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1]),
    ),
    max_size=6,
)


def write_sources(folder: Path, sizes: list[int]) -> tuple[list[tuple[Path, int]], bytes]:
    sources, whole = [], b""
    for number, size in enumerate(sizes):
        data = os.urandom(size)
        path = folder / f"{number}"
        path.write_bytes(data)
        sources.append((path, size))
        whole += data
    return sources, whole


def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_copy, "open_direct", lambda target: None)


def no_kernel_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EXDEV, "cross-device")

    no_direct(monkeypatch)
    monkeypatch.setattr(os, "copy_file_range", refuse)


def half_a_kernel_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = os.copy_file_range
    no_direct(monkeypatch)
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, n, *at: copy(a, b, n // 2, *at))


def strict_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    write = fast_copy.write_all

    def refuse(output: int, data: memoryview, at: int) -> None:
        if fcntl.fcntl(output, fcntl.F_GETFL) & os.O_DIRECT and len(data):
            raise OSError(errno.EINVAL, "not aligned as this device wants")
        write(output, data, at)

    monkeypatch.setattr(fast_copy, "write_all", refuse)


def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with reflinks, as far as the caller can tell."""

    def clone(output: int, request: int, argument: bytes) -> int:
        assert request == 0x4020940D
        source, start, length, at = struct.unpack("qQQQ", argument)
        assert start == 0
        assert length % 4096 == at % 4096 == 0
        assert length > 0
        os.pwrite(output, os.pread(source, length, start), at)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)


def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


WAYS = [as_it_is, no_direct, no_kernel_copy, half_a_kernel_copy, strict_alignment, sharing]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, start=st.sampled_from([0, 0, 7, fast_copy.ALIGNMENT]))
def test_every_way_gives_the_bytes_end_to_end(
    way: Any, sizes: list[int], start: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("append")
    sources, whole = write_sources(folder, sizes)
    target = folder / "target"
    target.write_bytes(b"x" * start)
    digest, told = hasher(), [0]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fast_copy, "BLOCK_BYTES", BLOCK)
        way(monkeypatch)
        fast_copy.append_files(target, start, sources, digest, told.append)
    assert target.read_bytes() == b"x" * start + whole
    assert digest.hexdigest() == digest_bytes(whole)
    assert sum(told) == len(whole)


@pytest.mark.parametrize("way", [as_it_is, no_direct])
def test_a_source_that_shrank_is_named(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way(monkeypatch)
    sources, _ = write_sources(tmp_path, [100, 100])
    (tmp_path / "target").touch()
    told = [sources[0], (sources[1][0], 101)]
    with pytest.raises(ArtifactError, match="1: changed its size"):
        fast_copy.append_files(tmp_path / "target", 0, told, hasher(), lambda _: None)
    sources[1][0].unlink()
    with pytest.raises(ArtifactError, match="1: cannot be read: No such file"):
        fast_copy.append_files(tmp_path / "target", 0, sources, hasher(), lambda _: None)


def test_a_full_disk_ends_the_copy_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    sources, _ = write_sources(tmp_path, [5 * fast_copy.BLOCK_BYTES + 1])
    (tmp_path / "target").touch()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        fast_copy.append_files(tmp_path / "target", 0, sources, hasher(), lambda _: None)


def filling(data: bytes) -> fast_copy.Fill:
    left = [memoryview(data)]

    def fill(memory: memoryview) -> None:
        memory[:] = left[0][: len(memory)]
        left[0] = left[0][len(memory) :]

    return fill


@pytest.mark.parametrize("way", [as_it_is, no_direct, strict_alignment])
@settings(max_examples=25, deadline=None)
@given(
    size=st.one_of(st.integers(0, 20 * BLOCK), st.integers(0, 20).map(lambda n: n * BLOCK)),
    start=st.sampled_from([0, 0, 7, fast_copy.ALIGNMENT]),
)
def test_what_is_filled_in_stands_in_the_file(
    way: Any, size: int, start: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("filled") / "target"
    target.write_bytes(b"x" * start)
    data, digest, told = os.urandom(size), hasher(), [0]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fast_copy, "BLOCK_BYTES", BLOCK)
        way(monkeypatch)
        fast_copy.append_filled(target, start, size, filling(data), digest, told.append)
    assert target.read_bytes() == b"x" * start + data
    assert digest.hexdigest() == digest_bytes(data)
    assert sum(told) == size


@pytest.mark.parametrize("size", [0, 5000, 2 * LARGE + 5])
def test_a_store_takes_what_is_filled_in_between_other_bytes(store_url: str, size: int) -> None:
    data = os.urandom(size)
    url = store.join(store_url, "out.bin")
    with store.open_output(url) as out:
        out.write(b"before")
        out.append_filled(size, filling(data))
        out.write(b"after")
    assert store.read_bytes(url) == b"before" + data + b"after"
    assert out.record.size_bytes == size + 11
    assert out.record.digest == digest_bytes(b"before" + data + b"after")


def test_what_cannot_be_filled_in_or_written_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]

    def torn(memory: memoryview) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise ArtifactError("the source is torn")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    size = 5 * fast_copy.BLOCK_BYTES
    with (
        pytest.raises(ArtifactError, match="the source is torn"),
        store.open_output(str(tmp_path / "out")) as out,
    ):
        out.append_filled(size, torn)
    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(InfrastructureError, match=r"out: write failed: .*No space left"),
        store.open_output(str(tmp_path / "out")) as out,
    ):
        out.append_filled(size, filling(bytes(size)))
    assert list(tmp_path.iterdir()) == []


def put(url: str, data: bytes) -> SourceFile:
    store.write_bytes(url, data)
    found = store.info(url)
    return SourceFile(url, found.size_bytes, found.version)


def test_files_are_appended_between_stores(store_url: str, tmp_path: Path) -> None:
    local = put(str(tmp_path / "local.bin"), os.urandom(5000))
    there = put(store.join(store_url, "there.bin"), os.urandom(3000))
    expected = b"".join(store.read_bytes(s.url) for s in (local, there, local))
    for target in (store.join(store_url, "out.bin"), str(tmp_path / "out.bin")):
        with store.open_output(target) as out:
            out.append_files([local, there, local])
            assert out.tell() == len(expected)
        assert store.read_bytes(target) == expected
        assert (out.record.size_bytes, out.record.digest) == (
            len(expected),
            digest_bytes(expected),
        )


def test_what_is_written_before_and_after_files_stays(tmp_path: Path) -> None:
    source = put(str(tmp_path / "a"), os.urandom(9000))
    with store.open_output(str(tmp_path / "out")) as out:
        out.write(b"before")
        out.append_files([source])
        out.write(b"after")
    data = (tmp_path / "out").read_bytes()
    assert data == b"before" + (tmp_path / "a").read_bytes() + b"after"
    assert out.record.digest == digest_bytes(data)


def test_a_source_that_changed_since_it_was_looked_at_is_named(store_url: str) -> None:
    source = put(store.join(store_url, "a.bin"), b"1" * 100)
    store.write_bytes(source.url, b"2" * 100)
    with (
        pytest.raises(ArtifactError, match=r"a\.bin: changed while it was being read"),
        store.open_output(store.join(store_url, "out.bin")) as out,
    ):
        out.append_files([source])
    assert not store.exists(store.join(store_url, "out.bin"))


def test_a_range_is_read_or_refused(store_url: str) -> None:
    source = put(store.join(store_url, "a.bin"), b"0123456789")
    assert store.read_range(source.url, 2, 5, source.version) == b"234"
    assert store.read_range(source.url, 5, 5) == b""
    for start, end in ((8, 12), (20, 22)):
        with pytest.raises(ArtifactError, match=r"a\.bin"):
            store.read_range(source.url, start, end)
    store.write_bytes(source.url, b"9876543210")
    with pytest.raises(ArtifactError, match="changed while it was being read"):
        store.read_range(source.url, 2, 5, source.version)
    store.delete(source.url)
    with pytest.raises(ArtifactError, match="there is no such file"):
        store.read_range(source.url, 2, 5)
