"""What is computed from a file is computed once for each version of it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainyard.artifacts import by_version
from trainyard.artifacts.by_version import remembered


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINYARD_DIGESTS", raising=False)
    monkeypatch.setattr(by_version, "LARGE", 4)


def old_file(path: Path, contents: bytes) -> str:
    path.write_bytes(contents)
    os.utime(path, (1e9, 1e9))
    return str(path)


def test_a_version_is_computed_once_by_any_number_of_readers(tmp_path: Path) -> None:
    url, computed = old_file(tmp_path / "a.idx", b"12345"), []

    def compute() -> int:
        computed.append(1)
        return 7

    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(lambda _: remembered(url, "sum", compute), range(32))]
    assert (found, len(computed)) == ([7] * 32, 1)
    assert remembered(url, "other", lambda: "text") == "text"
    assert remembered(old_file(tmp_path / "a.idx", b"54321"), "sum", lambda: 8) == 8


def test_a_fault_is_not_remembered(tmp_path: Path) -> None:
    url = old_file(tmp_path / "a.idx", b"12345")

    def fails() -> int:
        raise ValueError("damaged")

    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            remembered(url, "sum", fails)


def test_a_file_that_may_still_change_and_a_small_one_are_computed_again(tmp_path: Path) -> None:
    small, young = old_file(tmp_path / "small", b"1"), tmp_path / "young"
    young.write_bytes(b"12345")
    for url in (small, str(young)):
        assert [remembered(url, "sum", lambda n=n: n) for n in (1, 2)] == [1, 2]  # type: ignore[misc]
