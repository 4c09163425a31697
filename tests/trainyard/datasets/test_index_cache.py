"""Index caches: found by content, equal to what is built, never used when damaged."""

from __future__ import annotations

import json
import logging
import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainyard.artifacts import inputs, store
from trainyard.corpus import indexed as indexed_module
from trainyard.corpus.indexed import IndexedDataset, IndexedWriter
from trainyard.datasets import index_cache as cache_module
from trainyard.datasets import splits as splits_module
from trainyard.datasets.arrays import digest_array, map_array
from trainyard.datasets.blend import blend, blend_exhaustive
from trainyard.datasets.config import DataConfig
from trainyard.datasets.gpt import GPTDataset
from trainyard.datasets.index_cache import IN_MEMORY, IndexCache, Indexer
from trainyard.datasets.sample_format import SampleFormat
from trainyard.datasets.samples import SampleIndices, build_sample_indices
from trainyard.datasets.splits import documents_of_split
from trainyard.errors import ConfigError

LENGTHS = np.array([40, 3, 0, 90, 1, 27, 33, 12], np.int32)
DOCUMENTS = np.arange(8, dtype=np.int32)


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "machine"))


def make(indexer: Indexer, lengths: NDArray[np.int32] = LENGTHS, seed: int = 7) -> SampleIndices:
    return indexer.samples(lengths, DOCUMENTS[: len(lengths)], 16, seed, 40)


def same(one: SampleIndices, other: SampleIndices) -> bool:
    names = SampleIndices.__slots__
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def no_build(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was to be found, not built")


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(lambda n: sum(n) > 20),
    first=st.integers(0, 3),
    seq_length=st.integers(1, 16),
    num_samples=st.none() | st.integers(1, 60),
    extra=st.booleans(),
    drop=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_what_is_found_equals_what_is_built(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    first: int,
    seq_length: int,
    num_samples: int | None,
    extra: bool,
    drop: bool,
) -> None:
    array = np.array(lengths, np.int32)
    documents = np.arange(first, len(lengths), dtype=np.int32)
    if not len(documents) or array[documents].sum() <= seq_length:
        documents = np.arange(len(lengths), dtype=np.int32)
    call = (array, documents, seq_length, 5, num_samples, extra, drop)
    built = build_sample_indices(*call)
    cache = IndexCache(str(tmp_path_factory.mktemp("cache")))
    assert same(cache.samples(*call), built)
    assert same(cache.samples(*call), built)


def test_blends_are_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = [blend([0.3, 0.7], 500), blend_exhaustive([30, 5])]
    monkeypatch.setattr(cache_module.blends, "PIECE", 60)
    read_only = IndexCache(str(tmp_path / "none"), read_only=True)
    assert all(map(np.array_equal, read_only.blend([0.3, 0.7], 500), built[0]))
    for _ in range(2):
        cache = IndexCache(str(tmp_path / "c"))
        found = [cache.blend([0.3, 0.7], 500), cache.blend_exhaustive([30, 5])]
        for one, other in zip(found, built, strict=True):
            assert [a.dtype for a in one] == [a.dtype for a in other]
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        monkeypatch.setattr(cache_module.blends, "blend_pieces", no_build)
        monkeypatch.setattr(cache_module.blends, "exhaustive_pieces", no_build)


def test_a_second_run_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = make(IndexCache(str(tmp_path / "c")))
    monkeypatch.setattr(cache_module, "build_sample_indices", no_build)
    assert same(make(IndexCache(str(tmp_path / "c"))), built)
    (tmp_path / "c").rename(tmp_path / "moved")
    assert same(make(IndexCache(f"file://{tmp_path}/moved")), built)


@pytest.mark.slow
def test_remote_entries_are_fetched_once(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = make(IndexCache(s3_url))
    monkeypatch.setattr(cache_module, "build_sample_indices", no_build)
    assert same(make(IndexCache(s3_url)), built)
    fetched = sorted((tmp_path / "machine/indices").rglob("*.npy"))
    assert len(fetched) == 3
    opened: list[str] = []
    monkeypatch.setattr(store, "observers", [lambda name, url: opened.append(f"{name} {url}")])
    assert same(make(IndexCache(s3_url)), built)
    assert not [line for line in opened if line.startswith("read s3") and line.endswith(".npy")]
    fetched[0].write_bytes(b"something else")  # a copy that was damaged is fetched again
    assert same(make(IndexCache(s3_url)), built)


@pytest.mark.slow
def test_copies_are_bounded(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [make(IndexCache(s3_url), seed=seed) for seed in range(3)]
    monkeypatch.setattr(cache_module, "build_sample_indices", no_build)
    first = make(IndexCache(s3_url), seed=0)
    root = tmp_path / "machine/indices/blocks"
    bound = sum(path.stat().st_size for path in root.rglob("*.npy")) * 5 // 2
    monkeypatch.setenv("TRAINYARD_INDEX_CACHE_BYTES", str(bound))

    def age(seconds: float) -> None:
        for folder in root.iterdir():
            if folder.is_dir():
                used = folder.stat().st_mtime - seconds
                os.utime(folder, (used, used))

    oldest = set(root.glob("*/*.npy"))
    age(100)
    make(IndexCache(s3_url), seed=1)
    second = set(root.glob("*/*.npy")) - oldest
    age(100)
    make(IndexCache(s3_url), seed=0)  # used again, so that the other goes
    make(IndexCache(s3_url), seed=2)
    left = set(root.glob("*/*.npy"))
    assert sum(path.stat().st_size for path in left) <= bound
    assert oldest <= left
    assert not second <= left
    assert same(first, entries[0])
    monkeypatch.setenv("TRAINYARD_INDEX_CACHE_BYTES", "1")  # holds nothing but what is mapped
    for seed, entry in enumerate(entries):
        assert same(make(IndexCache(s3_url), seed=seed), entry)
    assert same(first, entries[0])
    monkeypatch.setenv("TRAINYARD_INDEX_CACHE_BYTES", "16G")
    with pytest.raises(ConfigError, match="TRAINYARD_INDEX_CACHE_BYTES='16G'"):
        make(IndexCache(s3_url), seed=0)


def test_a_copy_is_read_once(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(IndexCache(s3_url))
    built = make(IndexCache(s3_url))
    for path in (tmp_path / "machine/indices").rglob("*.npy"):
        os.utime(path, (1e9, 1e9))  # settled: their digests are remembered
        os.utime(path.parent, (1e9, 1e9))
    make(IndexCache(s3_url))
    used = [path.parent.stat().st_mtime for path in (tmp_path / "machine").rglob("*.npy")]
    assert min(used) > 1e9
    monkeypatch.setattr(inputs, "read_digest", lambda url: pytest.fail(f"{url} was read"))
    assert same(make(IndexCache(s3_url)), built)


def test_a_machine_folder_that_cannot_be_written_stops_nothing(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "machine").write_text("in the way")
    local = str(tmp_path / "c")
    built = make(IndexCache(local))
    for path in files(tmp_path / "c"):
        os.utime(path, (1e9, 1e9))  # settled, so that digests would be remembered
    make(IndexCache(s3_url))
    assert same(make(IndexCache(s3_url)), built)
    assert "built again" in caplog.text
    monkeypatch.setattr(cache_module, "build_sample_indices", no_build)
    assert same(make(IndexCache(local)), built)


def test_data_replaced_under_the_same_name_is_other_data(tmp_path: Path) -> None:
    cache = IndexCache(str(tmp_path / "c"))
    before = make(cache)
    longer = LENGTHS.copy()
    longer[3] += 1
    after = make(cache, longer)
    assert not same(before, after)
    assert same(after, make(IN_MEMORY, longer))
    assert len(list((tmp_path / "c").glob("*.json"))) == 2


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("name", range(4))
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "first byte", "last byte", "longer"])
def test_a_damaged_entry_is_never_used(
    tmp_path: Path, name: int, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "c"
    built = make(IndexCache(str(root)))
    whole = {path: path.read_bytes() for path in files(root)}
    path = list(whole)[name]
    data = whole[path]
    damaged = {
        "cut": data[:-5],
        "empty": b"",
        "first byte": bytes([data[0] ^ 1]) + data[1:],
        "last byte": data[:-2] + bytes([data[-2] ^ 1]) + data[-1:],
        "longer": data + b"\0",
    }
    path.unlink()
    if damage != "gone":
        path.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING):
        assert same(make(IndexCache(str(root))), built)
    assert {path: path.read_bytes() for path in files(root)} == whole
    if damage != "gone" or path.suffix != ".json":
        assert caplog.text.count("built again") == 1


def test_every_byte_of_the_document_counts_or_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "c"
    built = make(IndexCache(str(root)))
    (path,) = root.glob("*.json")
    data = path.read_bytes()
    for place in range(0, len(data), 31):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        assert same(make(IndexCache(str(root))), built)


@pytest.mark.parametrize("after", range(1, 16))
def test_a_killed_build_leaves_no_entry(
    tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between any two operations, as far as another process can tell."""
    root = tmp_path / "c"
    count = 0

    def interrupt(name: str, url: str) -> None:
        nonlocal count
        count += name in ("open", "write", "publish")
        if count >= after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "observers", [interrupt])
        with pytest.raises(KeyboardInterrupt):
            make(IndexCache(str(root)))
    assert not list(root.glob("*.json"))
    assert same(make(IndexCache(str(root))), make(IN_MEMORY))


def test_an_unwritable_cache_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "c"
    kept = make(IndexCache(str(root)))
    (tmp_path / "file").write_text("in the way")
    blocked = IndexCache(str(tmp_path / "file"))
    assert same(make(blocked), kept)
    assert "--data-cache-path" in caplog.text
    if os.geteuid() == 0:
        return  # root may write anywhere
    root.chmod(0o500)
    assert same(make(IndexCache(str(root))), kept)
    assert not same(make(IndexCache(str(root)), seed=8), kept)


def build_and_note(root: str, note: str) -> None:
    build = build_sample_indices

    def noted(*call: Any, **options: Any) -> SampleIndices:
        with open(note, "a") as file:
            file.write("built\n")
        return build(*call, **options)

    cache_module.build_sample_indices = noted
    make(IndexCache(root))


@pytest.mark.slow
def test_of_many_processes_one_builds(tmp_path: Path) -> None:
    context = get_context("fork")
    call = (str(tmp_path / "c"), str(tmp_path / "note"))
    processes = [context.Process(target=build_and_note, args=call) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "note").read_text() == "built\n"
    assert not list((tmp_path / "machine/indices").glob("*.lock"))


def test_the_document_says_what_the_entry_is(tmp_path: Path) -> None:
    make(IndexCache(str(tmp_path)))
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    assert document["facts"]["function"] == "sample_indices"
    assert document["facts"]["seed"] == 7
    assert document["facts"]["sequence_lengths"].startswith("8:")
    assert str(tmp_path) not in path.read_text()


def test_arrays_are_numpys_own_format(tmp_path: Path) -> None:
    built = make(IndexCache(str(tmp_path)))
    for name in SampleIndices.__slots__:
        (path,) = tmp_path.glob(f"*.{name}.npy")
        assert np.array_equal(np.load(path), getattr(built, name))
        assert not map_array(path).flags.writeable


def test_a_digest_is_of_values_not_of_how_they_lie() -> None:
    array = np.arange(10, dtype=np.int32)
    assert digest_array(array, "<i4") == digest_array(array.astype(">i8"), "<i4")
    assert digest_array(array, "<i4") == digest_array(np.arange(0, 20)[::2] // 2, "<i4")
    assert digest_array(array, "<i4") != digest_array(array[:-1], "<i4")


@given(st.integers(0, 3), st.integers(0, 40))
def test_a_range_of_documents_has_the_key_of_its_array(first: int, count: int) -> None:
    numbers = range(first, first + count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "CHUNK", 7)
        found = cache_module.digest_range(numbers)
    assert found == digest_array(np.array(numbers, np.int32), "<i4")


def test_a_second_start_does_not_read_a_large_index_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = str(tmp_path / "large")
    with open(f"{prefix}.bin", "wb") as out, open(f"{prefix}.idx", "wb") as idx:
        writer = IndexedWriter(out, np.uint16)
        tokens, lengths = np.zeros(300_000, np.int64), np.ones(300_000, np.int64)
        writer.add_flat(tokens, lengths, lengths)
        writer.write_index(idx)
    os.utime(f"{prefix}.idx", (1e9, 1e9))

    def start() -> SampleIndices:
        file = IndexedDataset(prefix)
        data = DataConfig(data_path=(prefix,), split="1,0,0")
        form = SampleFormat(seq_length=512, seed=1, vocab_size=10, eod=0)
        cache = IndexCache(str(tmp_path / "cache"))
        documents = documents_of_split(file, data, form, "train")
        return GPTDataset(file, documents, 100, form, indexer=cache).indices

    first = start()

    def no_reading(*_: object) -> None:
        pytest.fail("every entry is read again")

    for module, name in (
        (indexed_module, "verify_index"),
        (splits_module, "count_tokens"),
        (cache_module, "digest_array"),
        (cache_module, "digest_range"),
    ):
        monkeypatch.setattr(module, name, no_reading)
    second = start()
    assert np.array_equal(first.shuffle_index, second.shuffle_index)
