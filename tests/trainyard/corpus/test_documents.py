"""Any cut of a file gives its documents once, in order; every fault has a file, line and byte."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.artifacts import store
from trainyard.corpus.documents import (
    ByteRange,
    check_inputs,
    locate,
    read_documents,
    split_name,
    split_ranges,
)
from trainyard.errors import ConfigError, DataError

TEXT = ("text",)


def texts(url: str, unit_bytes: int = 1 << 20) -> list[str]:
    size = store.info(url).size_bytes
    return [
        document.values[0][0]
        for source in split_ranges(url, size, unit_bytes)
        for document in read_documents(source, TEXT)
    ]


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


# --- laws -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    lines=st.lists(st.one_of(st.none(), st.text(max_size=8).filter(_is_utf8)), max_size=8),
    unit_bytes=st.integers(1, 40),
    last_newline=st.booleans(),
    escape=st.booleans(),
)
def test_any_cut_gives_every_document_once(
    lines: list[str | None],
    unit_bytes: int,
    last_newline: bool,
    escape: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rows = ["" if t is None else json.dumps({"text": t}, ensure_ascii=escape) for t in lines]
    data = "\n".join(rows) + "\n" * last_newline
    url = write(tmp_path_factory.mktemp("cut") / "a.jsonl", data.encode())
    assert texts(url, unit_bytes) == [t for t in lines if t is not None]


def test_offsets_are_where_documents_begin(tmp_path: Path) -> None:
    data = b'{"text": "a"}\n\n{"text": "bb"}\n'
    url = write(tmp_path / "a.jsonl", data)
    offsets = [d.offset for d in read_documents(ByteRange(url, 0, len(data)), TEXT)]
    assert offsets == [0, 15]
    assert locate(url, 15) == f"{url}: line 3 (byte 15)"


def test_ranges_cover_a_file_without_gap(tmp_path: Path) -> None:
    ranges = split_ranges("a.jsonl", 1001, 100)
    assert ranges[0].start == 0
    assert ranges[-1].end == 1001
    assert all(a.end == b.start for a, b in itertools.pairwise(ranges))
    assert max(r.size_bytes for r in ranges) <= 100
    assert split_ranges("a.jsonl", 0, 100) == []
    assert split_ranges("a.txt", 1001, 100) == [ByteRange("a.txt", 0, 1001)]
    assert split_ranges("a.jsonl.gz", 1001, 100) == [ByteRange("a.jsonl.gz", 0, 1001)]


def test_documents_come_from_any_store(store_url: str) -> None:
    url = store.join(store_url, "a.jsonl")
    store.write_bytes(url, b"".join(b'{"text": "%d"}\n' % i for i in range(100)))
    assert texts(url, 64) == [str(i) for i in range(100)]


# --- kinds of files and values ----------------------------------------------------------------


def test_gzip_and_plain_text_are_read(tmp_path: Path) -> None:
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    assert texts(write(tmp_path / "a.jsonl.gz", gzip.compress(lines)), 3) == ["one", "two"]
    assert texts(write(tmp_path / "b.txt", b"one\ntwo\n"), 3) == ["one\ntwo\n"]
    assert texts(write(tmp_path / "c.txt.gz", gzip.compress(b"one\ntwo"))) == ["one\ntwo"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    assert texts(write(tmp_path / "a.jsonl", mark + b'{"text": "one"}\n')) == ["one"]
    assert texts(write(tmp_path / "b.txt", mark + b"one")) == ["one"]


def test_a_list_of_strings_is_sentences_and_keys_come_in_order(tmp_path: Path) -> None:
    line = b'{"a": ["one", "", "two"], "b": "three", "c": 1}\n'
    url = write(tmp_path / "a.jsonl", line)
    (document,) = read_documents(ByteRange(url, 0, len(line)), ("b", "a"))
    assert document.values == (("three",), ("one", "", "two"))


# --- refusals ---------------------------------------------------------------------------------

GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', "not a JSON document"),
        (b"not json", "not a JSON document"),
        (b"[" * 100_000, "not a JSON document"),
        (b'["text"]', "a JSON array where an object"),
        (b"17", "a JSON number where an object"),
        (b'{"body": "x"}', r"no key 'text', only \['body'\]; see --json-keys"),
        (b'{"text": null}', "holds a JSON null"),
        (b'{"text": 3}', "holds a JSON number"),
        (b'{"text": true}', "holds a JSON boolean"),
        (b'{"text": {"a": 1}}', "holds a JSON object"),
        (b'{"text": ["a", 1]}', "holds a JSON array"),
        (b'{"text": "\xff"}', "not UTF-8 .* at byte 10"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b'{"text": ["a", "\\uDC00b"]}', "lone surrogate"),
    ],
)
@pytest.mark.parametrize("unit_bytes", [8, 1 << 20])
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str, unit_bytes: int) -> None:
    url = write(tmp_path / "bad.jsonl", GOOD + GOOD + line + b"\n" + GOOD)
    with pytest.raises(DataError, match=r"bad\.jsonl: line 3 \(byte 34\): .*" + message) as caught:
        texts(url, unit_bytes)
    assert "it begins" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_whole_characters_written_as_escapes_are_text(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.jsonl", b'{"text": "\\ud83d\\ude00"}')) == ["\U0001f600"]


@pytest.mark.parametrize("cut", [1, 9, 20])
def test_a_truncated_gzip_is_named(tmp_path: Path, cut: int) -> None:
    data = gzip.compress(GOOD * 100)[:-cut]
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: broken after byte"):
        texts(write(tmp_path / "a.jsonl.gz", data))
    with pytest.raises(DataError, match=r"a\.txt\.gz: broken"):
        texts(write(tmp_path / "a.txt.gz", data))


def test_what_is_no_gzip_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: broken after byte 0"):
        texts(write(tmp_path / "a.jsonl.gz", GOOD))


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8"):
        texts(write(tmp_path / "a.txt", b"caf\xe9"))


def test_unknown_endings_are_refused() -> None:
    assert split_name("s3://b/a.json.gz") == ("jsonl", ".gz")
    with pytest.raises(ConfigError, match=r"a\.parquet ends in none of"):
        split_name("a.parquet")


def test_a_folder_of_text_and_jsonl_must_be_told_apart() -> None:
    with pytest.raises(ConfigError, match=r"finds both JSONL \(d/a\.jsonl\) and plain text"):
        check_inputs(["d"], ["d/a.jsonl", "d/b.txt"], TEXT)
    check_inputs(["d/a.jsonl", "d/b.txt"], ["d/a.jsonl", "d/b.txt"], TEXT)
    with pytest.raises(ConfigError, match="--json-keys"):
        check_inputs(["b.txt"], ["b.txt"], ("text", "title"))
