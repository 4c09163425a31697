"""The sidecar gives back what was written; joining parts gives what one writer gives."""

from __future__ import annotations

import io
import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.artifacts import store
from trainyard.corpus.documents import ByteRange, DocumentReader, split_ranges
from trainyard.corpus.provenance.origins import (
    Origin,
    Provenance,
    ProvenanceWriter,
    SidecarPart,
    join_provenance,
)
from trainyard.corpus.provenance.sidecar import HEADER
from trainyard.errors import ArtifactError, DataError

ORIGINS = st.lists(
    st.builds(
        Origin,
        st.sampled_from(["s3://b/a.jsonl", "/data/\u4e2d.jsonl", "b"]),
        st.integers(0, 2**63 - 1),
        st.integers(0, 2**40 - 1),
        st.integers(1, 2**62),
        st.one_of(st.none(), st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)),
    ),
    max_size=12,
)


def sidecar(origins: list[Origin]) -> bytes:
    writer = ProvenanceWriter()
    for origin in origins:
        writer.add(*origin)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


# --- laws -------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(origins=ORIGINS)
def test_round_trip(origins: list[Origin], tmp_path_factory: pytest.TempPathFactory) -> None:
    provenance = Provenance(write(tmp_path_factory.mktemp("p") / "a.docs", sidecar(origins)))
    provenance.verify()
    assert [provenance[k] for k in range(len(provenance))] == origins
    assert provenance.has_ids == any(origin.id is not None for origin in origins)
    for source in ["b", "nowhere", *provenance.sources]:
        expected = [k for k, origin in enumerate(origins) if origin.source == source]
        assert provenance.documents_of(source).tolist() == expected


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(origins=ORIGINS, cuts=st.lists(st.integers(0, 12), max_size=4))
def test_joined_parts_are_the_whole(
    origins: list[Origin], cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("p")
    bounds = [0, *sorted(min(cut, len(origins)) for cut in cuts), len(origins)]
    parts = []
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        lower = {o.source: min(p.line for p in origins if p.source == o.source) for o in origins}
        shift = {source: (line - 1) * (n % 2) for source, line in lower.items()}
        part = [o._replace(line=o.line - shift[o.source]) for o in origins[a:b]]
        parts.append(SidecarPart(write(folder / f"{n}.docs", sidecar(part)), shift))
    out = io.BytesIO()
    join_provenance(parts, out)
    assert out.getvalue() == sidecar(origins)


@settings(max_examples=30, deadline=None)
@given(origins=ORIGINS, data=st.data())
def test_a_damaged_sidecar_is_refused_or_read_within_its_bounds(
    origins: list[Origin], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = bytearray(sidecar(origins))
    path = tmp_path_factory.mktemp("p") / "a.docs"
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    write(path, whole)
    try:
        provenance = Provenance(str(path))
        provenance.verify()
        read = [provenance[k] for k in range(len(provenance))]
    except ArtifactError:
        read = []
    assert len(read) <= len(origins)
    with pytest.raises(ArtifactError, match=r"a\.docs (is|begins)"):
        Provenance(write(path, whole[:at]))
    with pytest.raises(ArtifactError, match=r"a\.docs"):
        Provenance(write(path, whole + b"\0"))


# --- with documents ---------------------------------------------------------------------------


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("unit_bytes", [400, 1 << 20])
def test_every_document_is_found_again(store_url: str, unit_bytes: int, tmp_path: Path) -> None:
    lines = [b'{"text": "t%d", "id": "doc %d"}' % (i, i) if i % 5 else b"" for i in range(40)]
    url = store.join(store_url, "a.jsonl")
    store.write_bytes(url, b"\n".join(lines))
    size = store.info(url).size_bytes
    parts, seen = [], 0
    for n, source in enumerate(split_ranges(url, size, unit_bytes)):
        writer = ProvenanceWriter(tmp_path)
        reader = DocumentReader(source, ("text",))
        for block in reader.blocks():
            writer.add_block(url, block)
        part = store.join(store_url, f"{n}.docs")
        with store.open_output(part) as out:
            writer.write(out)
        parts.append(SidecarPart(part, {url: seen}))
        seen += reader.lines
    whole = store.join(store_url, "whole.docs")
    with store.open_output(whole) as out:
        join_provenance(parts, out, tmp_path)
    provenance = Provenance(whole)
    assert provenance.sources == [url]
    assert len(provenance) == 32
    for k, origin in enumerate(provenance[k] for k in range(32)):
        number = k + 1 + k // 4
        assert origin.line == number + 1
        assert lines[number] == b"\n".join(lines)[origin.offset : origin.offset + origin.length]
        assert origin.id == f"doc {number}"


def test_columns_are_those_of_the_documents(tmp_path: Path) -> None:
    origins = [Origin("ab"[i % 2], i, 2 * i, i + 1, None) for i in range(10)]
    provenance = Provenance(write(tmp_path / "a.docs", sidecar(origins)))
    assert not provenance.has_ids
    assert provenance.source_numbers().tolist() == [0, 1] * 5
    assert provenance.source_numbers(3, 5).tolist() == [1, 0]
    assert provenance.records["offset"].tolist() == list(range(10))
    with pytest.raises(IndexError):
        provenance[10]


def test_writer_and_joiner_hold_little(tmp_path: Path) -> None:
    writer = ProvenanceWriter(tmp_path)
    data = b'{"text": "", "id": "an id of some letters"}\n' * 30_000
    (tmp_path / "a.jsonl").write_bytes(data)
    source = ByteRange(str(tmp_path / "a.jsonl"), 0, len(data))
    for _ in range(4):
        for block in DocumentReader(source, ("text",)).blocks():
            writer.add_block(source.url, block)
    with (tmp_path / "a.docs").open("wb") as file:
        writer.write(file)
    with (tmp_path / "b.docs").open("wb") as file:
        join_provenance([SidecarPart(str(tmp_path / "a.docs"))] * 2, file)
    provenance = Provenance(str(tmp_path / "b.docs"))
    assert len(provenance) == 240_000
    assert provenance[239_999].id == "an id of some letters"
    assert np.array_equal(provenance.records[:120_000], provenance.records[120_000:])


# --- refusals ---------------------------------------------------------------------------------


def header(**fields: Any) -> bytes:
    known = {"magic": b"TYDOCS\0\0", "version": 1, "flags": 0, "d": 0, "s": 0, "n": 0, "i": 0}
    return HEADER.pack(*{**known, **fields}.values(), 0, 0) + struct.pack("<Q", 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is 0 bytes, less than the 64"),
        (header(magic=b"PNG\0\0\0\0\0"), "begins with b'PNG"),
        (header(version=2), "format version 2; this reader knows version 1"),
        (header(flags=2), "the header has fields that version 1 does not have"),
        (header(i=1), "the header has fields that version 1 does not have"),
        (header(d=1), "truncated or overwritten"),
        (header(d=2**64 - 1), "truncated or overwritten"),
        (header(s=2**60), "truncated or overwritten"),
    ],
)
def test_an_invalid_sidecar_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    url = write(tmp_path / "a.docs", data)
    with pytest.raises(ArtifactError, match=rf"a\.docs.* {message}|a\.docs {message}|{message}"):
        Provenance(url)
    with pytest.raises(ArtifactError):
        join_provenance([SidecarPart(url)], io.BytesIO())


def test_a_record_of_no_source_is_named(tmp_path: Path) -> None:
    data = bytearray(sidecar([Origin("a", 0, 1, 1, None)] * 3))
    data[64 + 24 + 21] = 7  # the source number of the second record
    url = write(tmp_path / "a.docs", data)
    provenance = Provenance(url)
    assert provenance[0].source == "a"
    for use in (
        lambda: provenance[1],
        provenance.source_numbers,
        provenance.verify,
        lambda: join_provenance([SidecarPart(url)], io.BytesIO()),
    ):
        with pytest.raises(ArtifactError, match=r"a\.docs: document 1 names source 7 of 1"):
            use()


def test_a_document_beyond_the_format_is_refused() -> None:
    with pytest.raises(DataError, match="but the format allows only"):
        ProvenanceWriter().add("a", 0, 2**40, 1)
