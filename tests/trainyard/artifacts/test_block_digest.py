"""Digests in blocks: any ranges of a file, digested apart, give the digest of the whole."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from trainyard.artifacts import block_digest as blocks
from trainyard.artifacts import store
from trainyard.artifacts.inputs import raw_digest
from trainyard.errors import ArtifactError


@pytest.fixture(autouse=True)
def small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)


def written(path: Path, size: int) -> tuple[str, bytes]:
    data = random.Random(size).randbytes(size)
    path.write_bytes(data)
    os.utime(path, (1e9, 1e9))  # settled: its digest is remembered
    return str(path), data


@pytest.mark.parametrize("size", [1, 99, 100, 101, 1000, 1234])
@pytest.mark.parametrize("seed", range(5))
def test_digests_of_any_ranges_combine_to_that_of_the_whole(
    size: int, seed: int, tmp_path: Path
) -> None:
    url, data = written(tmp_path / "a", size)
    draw = random.Random(seed)
    cuts = sorted(draw.choices(range(size + 1), k=3))
    found: dict[int, str] = {}
    for start, end in pairwise([0, *cuts, size]):
        taken = blocks.RangeDigests(url, start, end, size)
        at = max(start - 1, 0)  # as lines are read: from a byte before the range to some after it
        until = draw.randrange(at, size + 1)
        while at < until:
            step = draw.randrange(1, 300)
            taken.pass_by(at, data[at : at + step])
            at += step + draw.choice([0, 0, 0, 50])  # a gap is read at the end
        digests = taken.finish()
        assert not found.keys() & set(range(taken.first, taken.first + len(digests)))
        found.update(enumerate(digests, taken.first))
    in_order = [found[number] for number in range(blocks.num_blocks(size))]
    assert blocks.combined(size, in_order) == blocks.block_digest(url)


def test_a_file_of_one_block_has_its_usual_digest(tmp_path: Path) -> None:
    for size in (0, 1, 100):
        url, _ = written(tmp_path / "a", size)
        assert blocks.block_digest(url) == raw_digest(url)
    assert blocks.block_digest(written(tmp_path / "a", 101)[0]) != raw_digest(str(tmp_path / "a"))


def test_a_combined_digest_is_remembered_for_the_version_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.artifacts.by_version.LARGE", 1)
    url, _ = written(tmp_path / "a", 250)
    found = store.info(url)
    taken = dict(enumerate(blocks.RangeDigests(url, 0, 250, 250).finish()))
    assert not blocks.remember_digest(url, found, {0: taken[0], 2: taken[2]})
    assert blocks.remember_digest(url, found, {**taken, 2: "not read again"})
    assert blocks.block_digest(url) == blocks.combined(250, [taken[0], taken[1], "not read again"])
    before = blocks.version_mark(url)
    written(tmp_path / "a", 251)
    assert not blocks.remember_digest(url, found, taken)
    assert blocks.version_mark(url) != before


def test_a_file_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    url, _ = written(tmp_path / "a", 150)
    with pytest.raises(ArtifactError, match="ends at byte 150, not at 250"):
        blocks.RangeDigests(url, 0, 250, 250).finish()


def test_files_that_are_looked_at_side_by_side_leave_the_mark_of_one_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (written(tmp_path / str(size), size)[0] for size in (10, 1000))
    info, taken = store.info, blocks.BlockDigests()

    def slow(url: str) -> store.FileInfo:
        if url == small:  # meanwhile another thread takes the other's digest
            monkeypatch.setattr(store, "info", info)
            taken(large)
        return info(url)

    monkeypatch.setattr(store, "info", slow)
    taken(small)
    assert taken.in_blocks
