"""One file that several machines write: all agree on it, and a new one has another id."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainyard.artifacts.shared_file import SharedFile, join_in
from trainyard.errors import ArtifactError


def test_all_that_begin_at_once_write_one_file(tmp_path: Path) -> None:
    folder = str(tmp_path / "shares")

    def write(number: int) -> str:
        file = join_in(folder, "key", 80)
        with file.opened(lambda start, end: []) as out:
            out.write(10 * number, bytes([number]) * 10)
            out.sync()
        return file.id

    with ThreadPoolExecutor(8) as threads:
        ids = set(threads.map(write, range(8)))
    assert len(ids) == 1
    file = SharedFile(folder, "key", ids.pop())
    assert {path.name for path in Path(folder).iterdir()} == {"key.json", f"key.{file.id}"}
    file.publish(str(tmp_path / "whole"), {})
    assert (tmp_path / "whole").read_bytes() == b"".join(bytes([n]) * 10 for n in range(8))
    assert join_in(folder, "key", 80).id != file.id  # it is published: whoever comes begins another


def test_a_description_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key.json").write_text('{"id": "../other"}')
    with pytest.raises(ArtifactError, match=r"key\.json: not the description of a file"):
        join_in(str(tmp_path), "key", 80)
