"""Files that several programs replace at once are always whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainyard.artifacts.replace_file import replace_file


def test_replacing_at_once_leaves_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    contents = [bytes([n]) * 10_000 for n in range(32)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda data: replace_file(path, data), contents * 8))
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_replacement_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "record.json" / "full").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "record.json", b"new")
    assert [one.name for one in tmp_path.iterdir()] == ["record.json"]
