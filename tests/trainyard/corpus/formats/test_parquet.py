"""Rows of Parquet files are the documents that lines of JSONL are."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.corpus.test_documents import read as read_lines
from trainyard.artifacts import store
from trainyard.corpus.documents import (
    BadLine,
    ByteRange,
    Document,
    DocumentReader,
    locate,
    split_ranges,
)
from trainyard.corpus.formats import parquet
from trainyard.corpus.formats.parquet import row_groups
from trainyard.errors import DataError


def write(path: Path, columns: dict[str, Any], rows_a_group: int = 1000, **options: Any) -> str:
    pq.write_table(pa.table(columns), path, row_group_size=rows_a_group, **options)
    return str(path)


def read(
    url: str, unit_bytes: int = 1, skip: bool = False, **options: Any
) -> tuple[list[Document], list[BadLine], int]:
    return read_lines(url, unit_bytes, on_bad_line="skip" if skip else "stop", **options)


VALUES = st.one_of(
    st.text(max_size=6).filter(lambda text: text.isprintable() or text.isascii()), st.none()
)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(VALUES, min_size=1, max_size=12),
    rows_a_group=st.integers(1, 5),
    unit_bytes=st.integers(1, 2000),
    lists=st.booleans(),
)
def test_any_cut_gives_the_documents_of_jsonl(
    texts: list[str | None],
    rows_a_group: int,
    unit_bytes: int,
    lists: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    values: list[Any] = [t if t is None or not lists else [t, ""] for t in texts]
    column = pa.array(values, pa.list_(pa.string()) if lists else pa.string())
    url = write(folder / "a.parquet", {"text": column, "id": texts}, rows_a_group)
    lines = [json.dumps({"text": v, "id": t}) for v, t in zip(values, texts, strict=True)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    ours, theirs = (read(u, unit_bytes, skip=True) for u in (url, str(folder / "a.jsonl")))
    assert ours[2] == theirs[2] == len(texts)
    assert [doc[2:] for doc in ours[0]] == [doc[2:] for doc in theirs[0]]
    assert [bad.line for bad in ours[1]] == [bad.line for bad in theirs[1]]
    assert ours == read(url, 1 << 20, skip=True)


def test_a_row_group_is_where_its_documents_lie(tmp_path: Path) -> None:
    url = write(tmp_path / "a.parquet", {"text": [f"t{i}" for i in range(10)]}, 4)
    groups = row_groups(url)
    assert [group.num_rows for group in groups] == [4, 4, 2]
    documents = read(url)[0]
    assert [(doc.offset, doc.length) for doc in documents[3:5]] == [
        (group.offset, group.size_bytes) for group in groups[:2]
    ]
    assert len(split_ranges(url, 1 << 20, 1)) == 3
    assert len(split_ranges(url, 1 << 20, groups[0].size_bytes * 2 + 1)) == 2
    assert split_ranges(url, 1 << 20, 1 << 20) == [ByteRange(url, 0, 1 << 20)]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
)
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd"])
def test_every_kind_of_text_is_read(tmp_path: Path, kind: pa.DataType, codec: str) -> None:
    texts = ["one", "", "caf\xe9 \u4e2d"]
    column = pa.array(texts, pa.string()).cast(kind)
    url = write(tmp_path / "a.parquet", {"text": column, "id": [1, None, 3]}, compression=codec)
    documents = read(url)[0]
    assert [doc.values for doc in documents] == [((text,),) for text in texts]
    assert [doc.id for doc in documents] == ["1", None, "3"]


def test_long_row_groups_are_read_in_lots(tmp_path: Path) -> None:
    texts = [f"{i} " * 100 for i in range(20_000)]
    url = write(tmp_path / "a.parquet", {"text": texts, "other": texts}, 20_000)
    (source,) = split_ranges(url, store.info(url).size_bytes, 1 << 30)
    blocks = list(DocumentReader(source, ("other", "text")).blocks())
    assert len(blocks) >= 8
    assert [text for block in blocks for text in block.texts[1]] == texts


def test_rows_come_from_any_store(store_url: str, tmp_path: Path) -> None:
    local = write(tmp_path / "a.parquet", {"text": [str(i) for i in range(100)]}, 30)
    url = store.join(store_url, "a.parquet")
    store.write_bytes(url, Path(local).read_bytes())
    assert [doc[:4] for doc in read(url)[0]] == [doc[:4] for doc in read(local)[0]]


# --- refusals ---------------------------------------------------------------------------------


def test_a_null_is_named(tmp_path: Path) -> None:
    url = write(tmp_path / "a.parquet", {"text": ["a", "b", "c", None]}, 3)
    message = r"a\.parquet: row 4 of the row group at byte \d+: key .* holds a JSON null"
    with pytest.raises(DataError, match=message + ".*; it begins 'null'"):
        read(url)
    assert [bad.line for bad in read(url, skip=True)[1]] == [4]


@pytest.mark.parametrize(
    ("column", "word"),
    [([1, 2], "number"), ([{"a": 1}], "object"), ([[1]], "array"), ([["a", None]], "array")],
)
def test_a_column_of_another_type_is_named(tmp_path: Path, column: Any, word: str) -> None:
    with pytest.raises(DataError, match=f"row 1 of .* holds a .*{word}"):
        read(write(tmp_path / "a.parquet", {"text": column}))


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_what_is_not_utf8_is_named(tmp_path: Path, kind: pa.DataType) -> None:
    data = pa.array([b"good", b"caf\xe9", b"more"], pa.binary())
    column = data if kind == pa.binary() else data.view(pa.string())
    url = write(tmp_path / "a.parquet", {"text": column})
    with pytest.raises(DataError, match=r"row 2 of .*not UTF-8"):
        read(url)
    documents, bad, lines = read(url, skip=True)
    assert [doc.line for doc in documents] == [1, 3]
    assert [one.line for one in bad] == [2]
    assert lines == 3


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    url = write(tmp_path / "a.parquet", {"body": ["a"]})
    with pytest.raises(DataError, match=r"a\.parquet: no column 'text', only body; see --json"):
        read(url, skip=True)


def test_an_invalid_parquet_file_is_refused(tmp_path: Path) -> None:
    for data in (b"x", b'{"text": "a"}\n' * 100, b"PAR1" + bytes(100) + b"PAR1"):
        (tmp_path / "a.parquet").write_bytes(data)
        with pytest.raises(DataError, match=r"a\.parquet: not a Parquet file, or a damaged one"):
            read(str(tmp_path / "a.parquet"))


def test_a_damaged_footer_is_named_or_read(tmp_path: Path) -> None:
    url = write(tmp_path / "a.parquet", {"text": ["a", "b"], "id": [1, 2]}, 1)
    data = Path(url).read_bytes()
    end = row_groups(url)[-1]
    for at in range(end.offset + end.size_bytes, len(data), 9):
        Path(url).write_bytes(data[:at] + bytes([data[at] ^ 0x88]) + data[at + 1 :])
        with suppress(DataError):
            read(url, skip=True)


def test_a_damaged_row_group_is_one_bad_line(tmp_path: Path) -> None:
    url = write(tmp_path / "a.parquet", {"text": [str(i) for i in range(90)]}, 30)
    group = row_groups(url)[1]
    data = bytearray(Path(url).read_bytes())
    data[group.offset : group.offset + group.size_bytes] = b"\xff" * group.size_bytes
    Path(url).write_bytes(data)
    with pytest.raises(DataError, match=r"row 31 of .*cannot be read .*30 of its 30 rows"):
        read(url)
    documents, bad, lines = read(url, skip=True)
    assert [doc.line for doc in documents] == [*range(1, 31), *range(61, 91)]
    assert (len(bad), lines) == (1, 90)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2**30, 3], pa.int32()).cast(pa.date32()),
        pa.array([1, 2**62, 3], pa.timestamp("us")),
    ],
    ids=["date", "timestamp"],
)
def test_an_id_that_python_has_no_value_for_is_named(tmp_path: Path, column: pa.Array) -> None:
    url = write(tmp_path / "a.parquet", {"text": ["a", "b", "c"], "id": column}, 3)
    documents, bad, lines = read(url, skip=True)
    assert [doc.values for doc in documents] == [(("a",),), (("c",),)]
    assert ([(one.line, one.reason[:12]) for one in bad], lines) == ([(2, "out of range")], 3)


def test_a_row_group_outside_the_file_is_not_passed_over(tmp_path: Path) -> None:
    """No range would hold it, so its rows would be missed in silence."""
    url = write(tmp_path / "a.parquet", {"text": ["a", "b"]}, 1)
    with parquet._opened(url) as (file, size):
        assert [group.num_rows for group in parquet._row_groups(file, size)] == [1, 1]
        last = row_groups(url)[-1].offset
        with pytest.raises(parquet._BrokenError, match=f"row group 1 begins at byte {last} of"):
            parquet._row_groups(file, last)


def test_missing_rows_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow ends without an error where pages hold fewer rows than the footer says."""
    url = write(tmp_path / "a.parquet", {"text": ["a", "b", "c"]}, 3)
    group = row_groups(url)[0]
    monkeypatch.setattr(
        parquet, "_row_groups", lambda file, size: [dataclasses.replace(group, num_rows=5)]
    )
    documents, bad, lines = read(url, skip=True)
    assert (len(documents), lines) == (3, 5)
    assert "its pages have 3 rows, but its footer says 5" in bad[0].reason


def test_a_row_is_located(tmp_path: Path) -> None:
    assert locate("a.parquet", 4, 17) == "a.parquet: row 17 of the row group at byte 4"


@pytest.mark.parametrize("rows_a_group", [1, 2, 10])
@pytest.mark.parametrize("kind", ["text", "list", "bytes"])
def test_a_row_too_large_is_a_bad_line(tmp_path: Path, rows_a_group: int, kind: str) -> None:
    plain = ["a", "x" * (3 << 20), "b", "y" * 1001, "z" * 1000]
    texts: list[Any] = {
        "text": plain,
        "list": [[text[:1], text[1:]] for text in plain],
        "bytes": [text.encode() for text in plain],
    }[kind]
    url = write(tmp_path / "a.parquet", {"text": texts}, rows_a_group)
    words = (
        r"row 2 of .*: the row has more than 1000 bytes, the limit of --max-document-bytes; split"
    )
    with pytest.raises(DataError, match=words):
        read(url, max_bytes=1000)
    documents, bad, lines = read(url, skip=True, max_bytes=1000)
    assert ["".join(one.values[0]) for one in documents] == ["a", "b", "z" * 1000]
    assert ([one.line for one in documents], [one.line for one in bad]) == ([1, 3, 5], [2, 4])
    assert lines == 5
    assert len(read(url)[0]) == 5


def test_a_huge_row_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = write(tmp_path / "a.parquet", {"text": ["x" * (3 << 20)]})
    monkeypatch.setattr("trainyard.corpus.formats.parquet._batches", None)
    with pytest.raises(DataError, match="the row has more than 1000 bytes"):
        read(url, max_bytes=1000)
