"""Any cut of a file gives its documents once, in order; every fault has a file, line and byte."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.artifacts import store
from trainyard.corpus.documents import (
    BadLine,
    ByteRange,
    Document,
    DocumentReader,
    locate,
    split_ranges,
)
from trainyard.corpus.formats.parse import begins, excerpt
from trainyard.errors import DataError

TEXT = ("text",)
GOOD = b'{"text": "good"}\n'


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def read(
    url: str, unit_bytes: int = 1 << 20, keys: Sequence[str] = TEXT, **options: Any
) -> tuple[list[Document], list[BadLine], int]:
    """All documents of a file with absolute lines, its bad lines, and its number of lines."""
    documents, bad, lines = [], [], 0
    for source in split_ranges(url, store.info(url).size_bytes, unit_bytes):
        reader = DocumentReader(source, keys, **options)
        documents += [doc._replace(line=doc.line + lines) for doc in reader]
        bad += [one._replace(line=one.line + lines) for one in reader.bad]
        lines += reader.lines
    return documents, bad, lines


def texts(url: str, unit_bytes: int = 1 << 20) -> list[str]:
    return [document.values[0][0] for document in read(url, unit_bytes)[0]]


def is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


# --- laws -------------------------------------------------------------------------------------

LINES = st.one_of(
    st.text(max_size=8).filter(is_utf8).map(lambda t: json.dumps({"text": t, "id": t[:1]})),
    st.text(max_size=3)
    .filter(is_utf8)
    .map(lambda t: json.dumps({"text": [t, ""]}, ensure_ascii=False)),
    st.sampled_from(["", "  ", "\r", "\x0b", '{"text": NaN}', '{"text": 1}', "{", '"text"', "\\"]),
    st.sampled_from(['{"text": "\\ud800"}', '{"text": "a", "x": NaN}', ' {"text": "b"} \r']),
)


@settings(max_examples=30, deadline=None)
@given(
    lines=st.lists(LINES, max_size=8),
    unit_bytes=st.integers(1, 60),
    last_newline=st.booleans(),
)
def test_any_cut_gives_the_documents_of_the_whole(
    lines: list[str], unit_bytes: int, last_newline: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = ("\n".join(['{"text": "first"}', *lines]) + "\n" * last_newline).encode()
    url = write(tmp_path_factory.mktemp("cut") / "a.jsonl", data)
    whole = read(url, on_bad_line="skip")
    assert read(url, unit_bytes, on_bad_line="skip") == whole
    documents, bad, num_lines = whole
    rows = data.split(b"\n")[: -1 if data.endswith(b"\n") else None]
    assert num_lines == len(rows)
    for place in [*documents, *bad]:
        assert data[place.offset :].split(b"\n")[0] == rows[place.line - 1]
        assert locate(url, place.offset) == f"{url}: line {place.line} (byte {place.offset})"
    for document in documents:
        line = data[document.offset : document.offset + document.length]
        value = json.loads(line)["text"]
        assert document.values == ((value,) if isinstance(value, str) else tuple(value),)
    assert len(documents) + len(bad) == sum(bool(row.strip()) for row in rows)


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text(max_size=30).filter(is_utf8), min_size=1, max_size=6),
    start=st.integers(0, 300),
    length=st.integers(1, 300),
)
def test_a_document_belongs_to_the_range_it_begins_in(
    texts: list[str], start: int, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    url = write(tmp_path_factory.mktemp("range") / "a.jsonl", data)
    start = min(start, len(data))
    end = min(start + length, len(data))
    documents = read(url)[0]
    ours = list(DocumentReader(ByteRange(url, start, end), TEXT))
    assert [doc[:2] for doc in ours] == [doc[:2] for doc in documents if start <= doc[0] < end]
    assert [doc.line for doc in ours] == list(range(1, len(ours) + 1))


def test_blocks_hold_what_documents_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainyard.corpus.formats.compression.PIECE_BYTES", 1 << 15)
    data = b"".join(
        b'{"text": %s, "id": %d}\n' % (b'["a", "b"]' if i % 3 else b'"c"', i) for i in range(3_000)
    )
    url = write(tmp_path / "a.jsonl", data)
    reader = DocumentReader(ByteRange(url, 0, len(data)), TEXT)
    blocks = list(reader.blocks())
    assert len(blocks) == 3
    assert [doc for block in blocks for doc in block.documents()] == list(reader)
    assert blocks[0].counts[0] is not None
    assert len(blocks[0].texts[0]) == sum(blocks[0].counts[0])
    assert blocks[1].ids is not None
    assert blocks[1].ids[0] == str(len(blocks[0]))


def test_documents_come_from_any_store(store_url: str) -> None:
    url = store.join(store_url, "a.jsonl")
    store.write_bytes(url, b"".join(b'{"text": "%d"}\n' % i for i in range(100)))
    assert texts(url, 64) == [str(i) for i in range(100)]


def test_a_very_long_line_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = json.dumps({"text": "long " * 1_000_000}).encode()
    url = write(tmp_path / "a.jsonl", GOOD + long + b"\n" + GOOD + long)
    whole = read(url)
    assert [doc.length for doc in whole[0]] == [16, len(long), 16, len(long)]
    assert read(url, 100_000) == whole


# --- what is a document -----------------------------------------------------------------------


def test_plain_text_is_one_document(tmp_path: Path) -> None:
    url = write(tmp_path / "b.txt", b"one\ntwo\n")
    assert read(url, 3) == ([Document(0, 8, 1, None, (("one\ntwo\n",),))], [], 1)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    assert texts(write(tmp_path / "a.jsonl", mark + b'{"text": "one"}\n')) == ["one"]
    assert texts(write(tmp_path / "b.txt", mark + b"one")) == ["one"]


def test_a_list_of_strings_is_sentences_and_keys_come_in_order(tmp_path: Path) -> None:
    line = b'{"a": ["one", "", "two"], "b": "three", "c": 1}\n'
    (document,), _, _ = read(write(tmp_path / "a.jsonl", line), keys=("b", "a"))
    assert document.values == (("three",), ("one", "", "two"))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "\\ud83d\\ude00"}', "\U0001f600"),
        (b'{"text": "a", "text": "b"}', "b"),
        (b'{"text": "a", "x": NaN, "y": -Infinity, "z": 1e999}', "a"),
        (b'{"text": "a", "x": "\\ud800"}', "a"),
        (b'\t{"text": "a"} \r', "a"),
        (b'{"text": "\\u0000"}', "\0"),
        (b'{"text": "caf\xc3\xa9"}', "caf\xe9"),
    ],
)
def test_what_megatron_reads_is_read(tmp_path: Path, line: bytes, text: str) -> None:
    assert texts(write(tmp_path / "a.jsonl", GOOD + line + b"\n")) == ["good", text]


@pytest.mark.parametrize(
    ("value", "id"),
    [
        (b'"doc-1"', "doc-1"),
        (b"17", "17"),
        (b"null", None),
        (b"1.5", "1.5"),
        (b"true", "true"),
        (b'{"a": [1, "\\u00e9"]}', '{"a": [1, "\\u00e9"]}'),
        (b'"\\ud800x"', "\\ud800x"),
        (b'"caf\xc3\xa9"', "caf\xe9"),
    ],
)
def test_an_id_is_kept_as_text(tmp_path: Path, value: bytes, id: str | None) -> None:
    url = write(tmp_path / "a.jsonl", b'{"text": "a", "id": %s}\n{"text": "b"}' % value)
    assert [doc.id for doc in read(url)[0]] == [id, None]
    assert [doc.id for doc in read(url, id_key=None)[0]] == [None, None]
    assert [doc.id for doc in read(url, id_key="text")[0]] == ["a", "b"]


class Halves:
    """Splits a text in two."""

    def split(self, text: str) -> list[str]:
        return [text[: len(text) // 2], text[len(text) // 2 :]] if text else []


def test_a_splitter_cuts_strings_and_leaves_lists(tmp_path: Path) -> None:
    url = write(tmp_path / "a.jsonl", b'{"text": "abcd"}\n{"text": ["ef", "g"]}\n{"text": ""}\n')
    documents, _, _ = read(url, splitter=Halves())
    assert [doc.values[0] for doc in documents] == [("ab", "cd"), ("ef", "g"), ()]


# --- refusals ---------------------------------------------------------------------------------

BAD: list[tuple[bytes, str]] = [
    (b'{"text": "x"', "not a JSON document"),
    (b"not json", "not a JSON document"),
    (b"[" * 5_000, "not a JSON document"),
    (b'{"text": "a"}{"text": "b"}', "not a JSON document .Extra data"),
    (b'["text"]', "a JSON array where an object"),
    (b"17", "a JSON number where an object"),
    (b"NaN", "a JSON number where an object"),
    (b'{"body": "x"}', r"no key 'text', only \['body'\]; name the key of the text with --json-key"),
    (b'{"body": "x", "y": NaN}', r"no key 'text', only \['body', 'y'\]"),
    (b'{"text": null}', "holds a JSON null"),
    (b'{"text": 3}', "holds a JSON number"),
    (b'{"text": NaN}', "holds a JSON number"),
    (b'{"text": true}', "holds a JSON boolean"),
    (b'{"text": {"a": 1}}', "holds a JSON object"),
    (b'{"text": ["a", 1]}', "array whose item 2 of 2 is a JSON number"),
    (b'{"text": "\xff"}', "not UTF-8 .* at byte 10"),
    (b'{"text": "\xed\xa0\x80"}', "not UTF-8 .* at byte 10"),
    (b'{"text": "\\ud800"}', "lone surrogate"),
    (b'{"text": ["a", "\\uDC00b"]}', "lone surrogate"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
@pytest.mark.parametrize("unit_bytes", [8, 1 << 20])
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str, unit_bytes: int) -> None:
    url = write(tmp_path / "bad.jsonl", GOOD + GOOD + line + b"\n" + GOOD)
    with pytest.raises(DataError, match=r"bad\.jsonl: line 3 \(byte 34\): .*" + message) as caught:
        texts(url, unit_bytes)
    assert "it begins" in str(caught.value)
    assert len(str(caught.value)) < 500
    with pytest.raises(DataError, match=r"; do this$"):
        read(url, advice="do this")


@pytest.mark.parametrize("unit_bytes", [8, 1 << 20])
def test_bad_lines_are_skipped_and_counted(tmp_path: Path, unit_bytes: int) -> None:
    rows = [GOOD, *(line + b"\n" for line, _ in BAD), GOOD]
    url = write(tmp_path / "bad.jsonl", b"".join(rows))
    documents, bad, lines = read(url, unit_bytes, on_bad_line="skip")
    assert lines == len(rows)
    assert [doc.line for doc in documents] == [1, len(rows)]
    assert [one.line for one in bad] == list(range(2, len(rows)))
    assert all(one.excerpt == one.excerpt[:60] or one.excerpt[60:] == "..." for one in bad)
    assert sorted(map(len, (one.reason for one in bad)))[-1] < 400


def test_the_beginning_of_a_line_is_text_and_quoted_in_messages() -> None:
    assert excerpt(b"") == excerpt("\r\n") == begins("") == ""
    assert excerpt(b"a\xff\n") == "a\ufffd"
    assert excerpt("'\u00e9'" * 30) == "'\u00e9'" * 20 + "..."
    assert begins("a'\ufffd") == '; it begins "a\'\\ufffd"'


def test_the_first_bad_line_is_named_first(tmp_path: Path) -> None:
    url = write(tmp_path / "bad.jsonl", GOOD + b'{"text": 1}\n' + b"{\n")
    with pytest.raises(DataError, match="line 2 "):
        read(url)


@pytest.mark.parametrize(
    "data",
    [
        json.dumps([{"text": "a"}, {"text": "b"}]),
        json.dumps([{"text": "a"}, {"text": "b"}], indent=1),
        "\n\n" + json.dumps({"text": "a"}, indent=2),
        '{"text": "a"},\n{"text": "b"}\n',
        '[{"text": "a"},\n{"text": "b"}]\n',
    ],
)
@pytest.mark.parametrize("on_bad_line", ["stop", "skip"])
def test_a_document_of_many_lines_is_refused(tmp_path: Path, data: str, on_bad_line: str) -> None:
    url = write(tmp_path / "a.json", data.encode())
    with pytest.raises(DataError, match=r"a\.json: line [13] .*objects, one per line; `jq -c"):
        read(url, on_bad_line=on_bad_line)


def test_a_file_that_shrank_is_refused(tmp_path: Path) -> None:
    url = write(tmp_path / "a.jsonl", GOOD)
    for start in (0, 30):
        with pytest.raises(DataError, match="shorter than the 40 bytes that it had"):
            list(DocumentReader(ByteRange(url, start, 40), TEXT, on_bad_line="skip"))


LONG = r"line 2 \(byte 17\): the line has more than \d+ bytes, the limit of --max-document-bytes"


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("end", [b"", b"\n", b"\n" + GOOD])
@pytest.mark.parametrize("size", [100, 1 << 20, 1 << 22])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_line_too_long_is_a_bad_one(tmp_path: Path, end: bytes, size: int, ending: str) -> None:
    data = GOOD + b'{"text": "' + b"x" * size + b'"}' + end
    data = gzip.compress(data) if ending else data
    url = write(tmp_path / f"a.jsonl{ending}", data)
    with pytest.raises(DataError, match=LONG):
        read(url, max_bytes=size)
    documents, bad, lines = read(url, on_bad_line="skip", max_bytes=size)
    assert [one.line for one in documents] == ([1, 3] if GOOD in end else [1])
    assert [(one.line, one.offset) for one in bad] == [(2, 17)]
    assert lines == (3 if GOOD in end else 2)
    assert len(read(url, max_bytes=size + 12)[0]) == lines


def test_a_line_that_is_too_long_is_refused_before_its_end_is_looked_for(tmp_path: Path) -> None:
    """A megabyte of gzip that holds a gigabyte, and is damaged behind a hundredth of it."""
    data = gzip.compress(b'{"text": "' + b"x" * (100 << 20), 1)
    url = write(tmp_path / "a.jsonl.gz", data[: len(data) // 10])
    words = r"line 1 \(byte 0\): the line has more than 1048576 bytes"
    with pytest.raises(DataError, match=words):
        read(url, max_bytes=1 << 20)


@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    cuts=st.lists(st.integers(0, 500), max_size=4),
    piece=st.sampled_from([3, 16, 1 << 20]),
)
def test_long_lines_are_the_same_for_any_cut(sizes: list[int], cuts: list[int], piece: int) -> None:
    lines = [b'{"text": "%s"}' % (b"x" * size) for size in sizes]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainyard.corpus.formats.compression.PIECE_BYTES", piece)
        patch.setattr("trainyard.corpus.formats.lines.PIECE_BYTES", piece)
        data = b"\n".join(lines)
        url = write(Path(folder, "a.jsonl"), data)
        bounds = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
        found, bad, seen = [], [], 0
        for start, end in pairwise(bounds):
            reader = DocumentReader(
                ByteRange(url, start, end), TEXT, on_bad_line="skip", max_bytes=32
            )
            found += [one.length for one in reader]
            bad += [one.offset for one in reader.bad]
            seen += reader.lines
    ends = list(accumulate(len(line) + 1 for line in lines))
    assert found == [len(line) for line in lines if len(line) <= 32]
    assert bad == [
        end - len(line) - 1 for end, line in zip(ends, lines, strict=True) if len(line) > 32
    ]
    assert seen == len(lines)


def test_a_text_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    url = write(tmp_path / "a.txt", b"x" * 101)
    with pytest.raises(DataError, match=r"a\.txt: .*the file, which is one document, has more"):
        read(url, max_bytes=100)
    assert len(read(url, max_bytes=101)[0]) == 1


def test_an_array_in_one_long_line_is_reported_as_an_array(tmp_path: Path) -> None:
    url = write(tmp_path / "a.jsonl", b'[{"text": "' + b"x" * (1 << 22) + b'"}]')
    with pytest.raises(DataError, match="is a JSON array: documents must be objects"):
        read(url, on_bad_line="skip", max_bytes=1 << 20)


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    url = write(tmp_path / "a.txt", b"caf\xe9")
    with pytest.raises(DataError, match=r"a\.txt: line 1 \(byte 0\): not UTF-8 .* at byte 3"):
        read(url)
    documents, bad, _ = read(url, on_bad_line="skip")
    assert not documents
    assert [one.line for one in bad] == [1]


@pytest.mark.parametrize("data", [b"", b"\n\n", b" \n\t"])
def test_a_file_without_documents_gives_none(tmp_path: Path, data: bytes) -> None:
    assert read(write(tmp_path / "a.jsonl", data))[:2] == ([], [])
    assert not read(write(tmp_path / "a.txt", b""))[0]
