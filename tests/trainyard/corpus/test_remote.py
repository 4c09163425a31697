"""Ranges of remote files through blocks on this node: right bytes, a bound, many readers."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.corpus import remote
from trainyard.corpus.blocks import BlockFolder
from trainyard.corpus.readers import map_file, map_listed
from trainyard.corpus.remote import CacheOptions, LazyArray, RangedFile, fetch_whole
from trainyard.datasets.config import DataConfig
from trainyard.datasets.splits import cache_options
from trainyard.errors import ArtifactError, ConfigError

DATA = bytes(np.random.default_rng(1).integers(0, 256, 10_000, dtype=np.uint8))


def options(folder: Path, **changes: Any) -> CacheOptions:
    return CacheOptions(
        **{"folder": folder, "block_bytes": 256, "max_bytes": 1 << 20, "blocks_ahead": 0, **changes}
    )


def ranged(folder: Path, **changes: Any) -> RangedFile:
    """A file of DATA, opened with a cache."""
    store.write_bytes(str(folder / "a.bin"), DATA)
    return RangedFile(str(folder / "a.bin"), options(folder / "cache", **changes))


def held(folder: Path) -> int:
    """Bytes of all blocks of a folder."""
    total = 0
    for parent, _, names in os.walk(folder / "blocks"):
        for name in set(names) - {"lock"}:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges asked of the store."""
    made: list[tuple[int, int]] = []
    read = store.read_range

    def noted(url: str, start: int, end: int, version: str | None = None) -> bytes:
        made.append((start, end))
        return read(url, start, end, version)

    monkeypatch.setattr(store, "read_range", noted)
    return made


def settle(file: RangedFile) -> None:
    """Wait until nothing is on its way."""
    deadline = time.monotonic() + 10
    while file._process.coming and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not file._process.coming


# --- reading ----------------------------------------------------------------------------------


def test_any_range_is_read_from_any_store(store_url: str, tmp_path: Path) -> None:
    url = store.join(store_url, "a.bin")
    store.write_bytes(url, DATA)
    file = RangedFile(url, options(tmp_path))
    random = np.random.default_rng(2)
    for start, end in [(0, 0), (0, 10_000), (255, 257), *random.integers(0, 10_000, (60, 2))]:
        low, high = sorted((int(start), int(end)))
        assert file.read(low, high) == DATA[low:high]
    for low, high in ((-1, 3), (5, 4), (0, 10_001)):
        with pytest.raises(IndexError):
            file.read(low, high)


def test_a_block_is_fetched_once(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    url = str(tmp_path / "a.bin")
    store.write_bytes(url, DATA)
    for _ in range(2):  # the second one is another process, as far as the folder can tell
        file = RangedFile(url, options(tmp_path / "cache"))
        assert file.read(300, 600) == DATA[300:600]
        assert file.read(9_990, 10_000) == DATA[9_990:]
    assert sorted(reads) == [(256, 512), (512, 768), (9_984, 10_000)]


def test_a_file_that_changed_is_never_mixed(store_url: str, tmp_path: Path) -> None:
    url = store.join(store_url, "a.bin")
    store.write_bytes(url, DATA)
    file = RangedFile(url, options(tmp_path))
    assert file.read(0, 10) == DATA[:10]
    store.write_bytes(url, DATA[::-1])
    assert file.read(0, 10) == DATA[:10]  # what it has is of the version that was opened
    with pytest.raises(ArtifactError, match="changed"):
        file.read(5000, 5010)
    assert RangedFile(url, options(tmp_path)).read(0, 10) == DATA[::-1][:10]


def test_a_block_that_was_damaged_or_removed_is_fetched_again(tmp_path: Path) -> None:
    file = ranged(tmp_path)
    file.read(0, 1024)
    settle(file)  # who reads a block on its way has its bytes and keeps nothing
    paths = sorted(p for p in (tmp_path / "cache").rglob("?") if p.is_file())
    assert len(paths) == 4
    paths[0].unlink()
    paths[1].write_bytes(b"short")
    assert file.read(0, 1024) == DATA[:1024]
    assert paths[1].stat().st_size == 256


def test_only_readers_in_order_are_read_ahead(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    file = ranged(tmp_path, blocks_ahead=2)
    file.read(0, 10)
    settle(file)
    assert sorted(reads) == [(0, 256), (256, 512), (512, 768)]
    file.read(5000, 5010)
    settle(file)
    assert len(reads) == 4
    file.prefetch([(7000, 7300), (7010, 7020)])
    settle(file)
    assert sorted(reads[4:]) == [(6912, 7168), (7168, 7424)]
    assert file.read(7000, 7300) == DATA[7000:7300]
    assert len(reads) == 6


def test_threads_share_one_request_of_a_block(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    file = ranged(tmp_path)
    begin = threading.Barrier(8)
    found: list[bytes] = []

    def read() -> None:
        begin.wait()
        found.append(file.read(0, 2560))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [DATA[:2560]] * 8
    assert len(reads) == 10


def test_a_block_that_arrives_after_the_look_is_not_fetched_again(
    tmp_path: Path, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ranged(tmp_path)
    look = BlockFolder.read

    def look_too_early(folder: BlockFolder, *block: Any) -> bytes | None:
        """Misses the block; another thread has fetched it before this one can."""
        monkeypatch.setattr(BlockFolder, "read", look)
        other = threading.Thread(target=file.read, args=(0, 256))
        other.start()
        other.join()
        return None

    monkeypatch.setattr(BlockFolder, "read", look_too_early)
    assert file.read(10, 20) == DATA[10:20]
    assert reads == [(0, 256)]


def test_a_fault_ahead_is_raised_on_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ranged(tmp_path)
    os.unlink(tmp_path / "a.bin")
    file.prefetch([(0, 10)])
    settle(file)
    with pytest.raises(ArtifactError, match=r"a\.bin"):
        file.read(0, 10)


def test_lazy_arrays_are_read_in_slices(tmp_path: Path) -> None:
    values = np.arange(100, dtype="<i8")
    store.write_bytes(str(tmp_path / "a"), b"1234" + values.tobytes())
    lazy = LazyArray(RangedFile(str(tmp_path / "a"), options(tmp_path / "c")).read, 4, 100, "<i8")
    assert len(lazy) == 100
    assert (lazy[0], lazy[-1], lazy[57]) == (0, 99, 57)
    assert lazy[90:1000].tolist() == list(range(90, 100))
    assert lazy[:0].tolist() == []


# --- processes --------------------------------------------------------------------------------


def _read_at_random(file: RangedFile, seed: int) -> None:
    signal.alarm(60)
    random = np.random.default_rng(seed)
    for start in random.integers(0, 9_000, 40).tolist():
        if file.read(start, start + 700) != DATA[start : start + 700]:
            os._exit(7)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_a_folder_and_its_bound(
    method: str, s3_url: str, tmp_path: Path, reads: list[tuple[int, int]]
) -> None:
    url = store.join(s3_url, "a.bin")
    store.write_bytes(url, DATA)
    small = options(tmp_path, max_bytes=3000, blocks_ahead=1)
    file = RangedFile(url, small)
    file.read(0, 2000)  # threads and connections are there when the process forks
    context = multiprocessing.get_context(method)
    children = [context.Process(target=_read_at_random, args=(file, n)) for n in range(2)]
    for child in children:
        child.start()
    largest = 0
    while any(child.is_alive() for child in children):
        with small.blocks._locked():
            largest = max(largest, held(tmp_path))
        time.sleep(0.002)
    assert [child.exitcode for child in children] == [0, 0]
    assert 0 < max(largest, held(tmp_path)) <= 3000
    assert len(pickle.dumps(file)) < 500


# --- the folder -------------------------------------------------------------------------------


def put(folder: BlockFolder, key: str, name: str, size: int) -> Path:
    return folder.put(key, name, size, lambda file: file.write(b"x" * size))


def test_the_least_recently_used_block_is_removed_first(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, 1000)
    paths = [put(folder, "k", str(n), 200) for n in range(5)]
    for age, path in enumerate(paths):
        os.utime(path, (1e9 + age, 1e9 + age))
    assert folder.read("k", "0", 0, 5) == b"xxxxx"  # used now
    put(folder, "other", "0", 200)
    assert [path.exists() for path in paths] == [True, False, False, True, True]
    assert held(tmp_path) <= 1000


def test_nothing_but_blocks_is_ever_removed(tmp_path: Path) -> None:
    (tmp_path / "mine.bin").write_bytes(b"y" * 5000)
    folder = BlockFolder(tmp_path, 1000)
    for n in range(20):
        put(folder, f"k{n}", "0", 300)
    assert (tmp_path / "mine.bin").stat().st_size == 5000
    assert held(tmp_path) <= 1000
    assert len(list((tmp_path / "blocks").iterdir())) <= 5  # folders go with their last block


def test_temporary_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, 1000)
    put(folder, "k", "0", 300)
    torn = tmp_path / "blocks" / "k" / ".tmp-1-2-3"
    torn.write_bytes(b"x" * 300)
    os.utime(torn, (1e9, 1e9))
    (tmp_path / "blocks" / "lock").write_bytes(b"nonsense")
    put(folder, "k", "1", 300)
    assert not torn.exists()
    assert held(tmp_path) == 600


def test_a_full_folder_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BlockFolder, "put", full)
    remote._warned.clear()
    file = ranged(tmp_path)
    assert file.read(0, 5000) == DATA[:5000]
    assert caplog.text.count("No space left") == 1


def test_a_bound_below_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is too small for a block"):
        CacheOptions(tmp_path, max_bytes=10, block_bytes=20)


def test_whole_files_copied_once(s3_url: str, tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    url = store.join(s3_url, "a.idx")
    store.write_bytes(url, DATA)
    for _ in range(2):
        assert fetch_whole(url, options(tmp_path), map_file).tobytes() == DATA
    assert len(reads) == 1
    store.write_bytes(url, DATA[::-1])
    assert fetch_whole(url, options(tmp_path), map_file).tobytes() == DATA[::-1]


def test_a_file_larger_than_the_cache_is_read_after_the_raise_that_the_error_asks_for(
    tmp_path: Path,
) -> None:
    url, size = tmp_path / "a.idx", (64 << 20) + 1
    with url.open("wb") as file:
        file.truncate(size)
    data = DataConfig(
        data_path=("any",),
        object_storage_cache_path=str(tmp_path / "cache"),
        object_storage_cache_size_mb=64,
    )
    with pytest.raises(ConfigError, match=f"is {size} bytes, more than the {64 << 20}") as caught:
        fetch_whole(str(url), cache_options(data), map_file)
    said = re.search(r"; raise --([a-z-]+) \((\d+)\) above (\d+)$", str(caught.value))
    assert said is not None
    option, now, above = said[1].replace("-", "_"), int(said[2]), int(said[3])
    assert getattr(data, option) == now == above
    assert option == "object_storage_cache_size_mb"
    raised = replace(data, object_storage_cache_size_mb=above + 1)
    assert len(fetch_whole(str(url), cache_options(raised), map_file)) == size


def test_a_copy_is_compared_with_its_record_as_it_is_made(
    s3_url: str, tmp_path: Path, reads: list[tuple[int, int]]
) -> None:
    url = store.join(s3_url, "a.idx")
    with store.open_output(url) as out:
        out.write(DATA)
    right = out.record
    assert right is not None
    assert fetch_whole(url, options(tmp_path), map_file).tobytes() == DATA  # one without a record
    for _ in range(2):
        assert map_listed(url, right, options(tmp_path)).tobytes() == DATA
    assert len(reads) == 2
    wrong = replace(right, digest=digest_bytes(b"another"))
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"a\.idx: digest"):
            map_listed(url, wrong, options(tmp_path))
    assert len([*tmp_path.rglob("whole*")]) == 2


def test_a_fork_under_the_lock_does_not_keep_the_lock(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, 1000)
    put(folder, "k", "0", 10)
    with folder._locked():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
    try:
        thread = threading.Thread(target=put, args=(folder, "k", "1", 10), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    finally:
        child.kill()
        child.join()
