"""Lines of a file of any size are read in little memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.artifacts import store
from trainyard.artifacts.backends import readahead
from trainyard.artifacts.lines import file_record, read_lines, read_listed_lines, split_lines
from trainyard.errors import ArtifactError


@given(st.lists(st.binary(max_size=6)))
def test_lines_do_not_depend_on_blocks(blocks: list[bytes]) -> None:
    whole = b"".join(blocks)
    lines = list(split_lines(blocks))
    assert lines == whole.removesuffix(b"\n").split(b"\n") * bool(whole)


def test_a_file_is_read_line_by_line_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "BLOCK_BYTES", 2**16)
    path = tmp_path / "ledger.jsonl"
    path.write_bytes((b"x" * 99 + b"\n") * 80_000)
    tracemalloc.start()
    try:
        assert sum(len(line) == 99 for line in read_lines(str(path))) == 80_000
        assert tracemalloc.get_traced_memory()[1] < 2e6, "of 8 MB"
    finally:
        tracemalloc.stop()


def test_lines_that_differ_from_their_record_are_refused(store_url: str) -> None:
    url = store.join(store_url, "a")
    store.write_bytes(url, b"1\n2\n")
    record = file_record(url, "a")
    assert list(read_listed_lines(url, record)) == [b"1", b"2"]
    store.write_bytes(url, b"1\n3\n")
    with pytest.raises(ArtifactError, match="damaged or was replaced"):
        read_listed_lines(url, record)
