"""Which files are read, how they are cut, and that compression does not change documents."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.corpus.documents import (
    BadLine,
    ByteRange,
    Document,
    DocumentReader,
    check_inputs,
    split_name,
    split_ranges,
)
from trainyard.corpus.formats import compression
from trainyard.errors import ConfigError, DataError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
GOOD = b'{"text": "good"}\n'
CONTENTS = b"".join(b'{"text": "document %d", "id": "%d"}\n' % (i, i) for i in range(2000))


def read(path: Path, skip: bool = False) -> tuple[list[Document], list[BadLine], int]:
    (source,) = split_ranges(str(path), path.stat().st_size, 1000)
    reader = DocumentReader(source, ("text",), on_bad_line="skip" if skip else "stop")
    return list(reader), reader.bad, reader.lines


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# --- laws -------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(0, len(CONTENTS)), max_size=4),
    ending=st.sampled_from(sorted(COMPRESS)),
    held=st.sampled_from([".jsonl", ".json", ".txt"]),
)
def test_compression_in_any_members_does_not_change_documents(
    cuts: list[int], ending: str, held: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("members")
    plain = write(folder / f"a{held}", CONTENTS)
    reader = DocumentReader(ByteRange(str(plain), 0, len(CONTENTS)), ("text",))
    bounds = [0, *sorted(cuts), len(CONTENTS)]
    members = [COMPRESS[ending](CONTENTS[a:b]) for a, b in itertools.pairwise(bounds)]
    packed = write(folder / f"b{held}{ending}", b"".join(members))
    assert read(packed) == (list(reader), [], reader.lines)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(ending=st.sampled_from(sorted(COMPRESS)), data=st.data())
def test_a_compressed_file_cut_anywhere_is_broken(
    ending: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    packed = COMPRESS[ending](CONTENTS)
    cut = data.draw(st.integers(1, len(packed) - 1))
    path = write(tmp_path_factory.mktemp("cut") / f"a.jsonl{ending}", packed[:cut])
    with pytest.raises(DataError, match=r"line \d+ \(byte \d+\): the \w+ data end in the middle"):
        read(path)
    documents, bad, lines = read(path, skip=True)
    whole = read(write(path, packed))[0]
    assert documents == whole[: len(documents)]
    (lost,) = bad
    assert lost.line == len(documents) + 1 == lines
    assert "the rest is lost" in lost.reason


@pytest.mark.parametrize("ending", sorted(COMPRESS))
def test_what_follows_the_last_member_is_named(tmp_path: Path, ending: str) -> None:
    packed = COMPRESS[ending](GOOD) + b"garbage that is no member"
    path = write(tmp_path / f"a.jsonl{ending}", packed)
    with pytest.raises(DataError, match=r"or damaged after 1 whole member"):
        read(path)
    documents, bad, _ = read(path, skip=True)
    assert [doc.values for doc in documents] == [(("good",),)]
    assert len(bad) == 1


@pytest.mark.parametrize("ending", sorted(COMPRESS))
def test_damage_is_named(tmp_path: Path, ending: str) -> None:
    packed = bytearray(COMPRESS[ending](CONTENTS))
    packed[len(packed) // 2] ^= 0x55
    if ending == ".zst":  # carries no checksum unless asked
        packed = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(CONTENTS))
        packed[-1] ^= 1
    for name in (f"a.jsonl{ending}", f"a.txt{ending}"):
        with pytest.raises(DataError, match=rf"{name}: line \d+ \(byte \d+\): .* data, or damaged"):
            read(write(tmp_path / name, packed))


@pytest.mark.parametrize("ending", sorted(COMPRESS))
def test_what_is_not_compressed_is_named(tmp_path: Path, ending: str) -> None:
    with pytest.raises(DataError, match=r"line 1 \(byte 0\): not \w+ data"):
        read(write(tmp_path / f"a.jsonl{ending}", GOOD * 9))


@pytest.mark.parametrize("ending", sorted(COMPRESS))
def test_a_compressed_file_without_contents_has_no_document(tmp_path: Path, ending: str) -> None:
    for held in (".jsonl", ".txt"):
        assert read(write(tmp_path / f"a{held}{ending}", COMPRESS[ending](b""))) == ([], [], 0)


def test_zeros_after_the_last_member_are_ignored(tmp_path: Path) -> None:
    for ending in (".gz", ".xz"):
        packed = COMPRESS[ending](GOOD) + bytes(20_000)
        assert len(read(write(tmp_path / f"a.jsonl{ending}", packed))[0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ending", sorted(COMPRESS))
def test_pieces_are_bounded(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a{ending}", COMPRESS[ending](bytes(20 << 20)))
    sizes = [len(piece) for piece in compression.contents(str(path), ending)]
    assert sum(sizes) == 20 << 20
    if ending != ".zst":
        assert max(sizes) <= compression.PIECE_BYTES


def test_many_small_members_take_no_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(GOOD) * 5000)
    assert len(read(path)[0]) == 5000


# --- which files, which ranges ----------------------------------------------------------------


def test_ranges_cover_a_file_without_gap(tmp_path: Path) -> None:
    ranges = split_ranges("a.jsonl", 1001, 100)
    assert ranges[0].start == 0
    assert ranges[-1].end == 1001
    assert all(a.end == b.start for a, b in itertools.pairwise(ranges))
    assert max(r.size_bytes for r in ranges) <= 100
    assert split_ranges("a.jsonl", 0, 100) == []
    assert split_ranges("a.txt", 1001, 100) == [ByteRange("a.txt", 0, 1001)]
    assert split_ranges("a.jsonl.gz", 1001, 100) == [ByteRange("a.jsonl.gz", 0, 1001)]


def test_the_name_of_a_file_tells_its_format() -> None:
    assert split_name("s3://b/a.json.gz") == ("jsonl", ".gz")
    assert split_name("a.b.jsonl.zst") == ("jsonl", ".zst")
    assert split_name("x/a.txt.xz") == ("text", ".xz")
    assert split_name("a.parquet") == ("parquet", "")
    for name in ("a.csv", "a.gz", "jsonl", "a.parquet.gz", "a.jsonl.lz4"):
        with pytest.raises(ConfigError, match=r"must end in one of \.jsonl, \.json"):
            split_name(name)


def test_a_folder_of_different_kinds_needs_a_pattern() -> None:
    with pytest.raises(ConfigError, match=r"finds both JSONL \(d/a\.jsonl\) and plain text"):
        check_inputs(["d"], ["d/a.jsonl", "d/b.txt"], ("text",))
    with pytest.raises(ConfigError, match=r"both Parquet \(d/a\.parquet\) and JSONL"):
        check_inputs(["d"], ["d/a.parquet", "d/b.jsonl"], ("text",))
    check_inputs(["d"], ["d/a.json", "d/b.jsonl.gz"], ("text",))
    check_inputs(["d/a.jsonl", "d/b.txt"], ["d/a.jsonl", "d/b.txt"], ("text",))
    with pytest.raises(ConfigError, match="--json-keys"):
        check_inputs(["b.txt"], ["b.txt"], ("text", "title"))


def test_files_of_other_writers_in_a_folder_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    aside = ["d/_SUCCESS", "d/.a.jsonl.crc", "d/x/_temporary/0/b.jsonl"]
    assert check_inputs(["d/"], [*aside, "d/x/a.jsonl"], ("text",)) == ("d/x/a.jsonl",)
    (line,) = caplog.messages
    assert all(name in line for name in aside)
    named = ["_d/_a.jsonl", "_d/b.jsonl"]  # by a pattern, or as it is: somebody wants it
    assert check_inputs(["_d/_*", "_d/b.jsonl"], named, ("text",)) == tuple(named)
    assert check_inputs(["_d"], named, ("text",)) == ("_d/b.jsonl",)
    with pytest.raises(ConfigError, match="d/README must end in one of"):
        check_inputs(["d"], ["d/a.jsonl", "d/README"], ("text",))


def test_many_files_are_checked_in_no_time() -> None:
    many = [f"d/{i}.jsonl" for i in range(50_000)]
    assert check_inputs(many, many, ("text",)) == tuple(many)
