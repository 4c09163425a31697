"""Token files: golden bytes, round trips, and refusals of what is broken."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.corpus.token_files import Documents, token_bytes, write_tokens
from tests.vectors import GOLDEN
from trainyard.artifacts import store
from trainyard.corpus import disk_array, layout
from trainyard.corpus.indexed import IndexedDataset, IndexedWriter, optimal_dtype
from trainyard.corpus.layout import parse_index, verify_index
from trainyard.errors import ArtifactError, DataError


def golden() -> dict[str, Any]:
    vectors: dict[str, Any] = json.loads((GOLDEN / "megatron_vectors.json").read_text())
    return vectors


# --- Megatron's bytes -------------------------------------------------------------------------


def test_layout_is_megatrons() -> None:
    case = golden()["layout"]
    bin_data, idx_data = token_bytes(case["docs"], case["dtype"])
    assert bin_data.hex() == case["bin_hex"]
    assert idx_data.hex() == case["idx_hex"]


def test_multimodal_layout_is_megatrons() -> None:
    case = golden()["layout_multimodal"]
    bin_data, idx_data = token_bytes([[[1, 2], [3, 4]]], np.int32, modes=[[0, 1]])
    assert bin_data.hex() == case["bin_hex"]
    assert idx_data.hex() == case["idx_hex"]
    index = parse_index(np.frombuffer(idx_data, np.uint8), "golden")
    assert index.modes is not None
    assert index.modes.tolist() == [0, 1]


def test_many_documents_at_once_give_megatrons_bytes() -> None:
    case = golden()["layout"]
    sequences = [sequence for doc in case["docs"] for sequence in doc]
    bin_file, idx_file = io.BytesIO(), io.BytesIO()
    writer = IndexedWriter(bin_file, case["dtype"])
    ids = np.array([token for sequence in sequences for token in sequence], np.uint32)
    writer.add_flat(ids, [len(s) for s in sequences], [len(doc) for doc in case["docs"]])
    writer.write_index(idx_file)
    assert bin_file.getvalue().hex() == case["bin_hex"]
    assert idx_file.getvalue().hex() == case["idx_hex"]


def test_optimal_dtype_is_megatrons() -> None:
    for vocab_size, dtype in golden()["optimal_dtype"].items():
        assert optimal_dtype(int(vocab_size)) == np.dtype(dtype)
    assert optimal_dtype(None) == np.int32


# --- laws -------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    docs=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=6), max_size=4), max_size=8),
    dtype=st.sampled_from([np.uint16, np.int32, np.int64]),
)
def test_what_was_written_is_read(docs: Documents, dtype: Any) -> None:
    bin_data, idx_data = token_bytes(docs, dtype)
    index = parse_index(np.frombuffer(idx_data, np.uint8), "test")
    verify_index(index, "test")
    tokens = np.frombuffer(bin_data, dtype)
    starts = index.sequence_offsets // index.dtype.itemsize
    found = [
        [
            tokens[starts[i] : starts[i] + index.sequence_lengths[i]].tolist()
            for i in range(index.document_indices[d], index.document_indices[d + 1])
        ]
        for d in range(len(docs))
    ]
    assert found == docs
    assert index.bin_bytes == len(bin_data)


@settings(max_examples=40, deadline=None)
@given(
    docs=st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=3), max_size=9),
    cuts=st.lists(st.integers(0, 9), max_size=3).map(sorted),
    limit=st.sampled_from([1, 20, 1 << 20]),
)
def test_lots_give_the_bytes_of_documents(docs: Documents, cuts: list[int], limit: int) -> None:
    bin_file, idx_file = io.BytesIO(), io.BytesIO()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(disk_array, "LIMIT_BYTES", limit)
        monkeypatch.setattr(disk_array, "CHUNK", 3)
        writer = IndexedWriter(bin_file, np.int32, multimodal=True)
        for first, last in itertools.pairwise([0, *cuts, len(docs)]):
            lot = docs[first:last]
            sequences = [sequence for doc in lot for sequence in doc]
            ids = np.array([token for sequence in sequences for token in sequence], np.int64)
            counts = [len(doc) for doc in lot]
            writer.add_flat(ids, list(map(len, sequences)), counts, [1] * len(sequences))
        writer.write_index(idx_file)
    modes = [[1] * len(doc) for doc in docs]
    assert (bin_file.getvalue(), idx_file.getvalue()) == token_bytes(docs, np.int32, modes)
    assert writer.num_tokens == sum(len(s) for doc in docs for s in doc)


def test_writing_takes_no_memory_by_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(io.RawIOBase):
        def write(self, data: Any) -> int:
            return len(data)

    monkeypatch.setattr(disk_array, "LIMIT_BYTES", 1 << 18)
    writer = IndexedWriter(Nothing(), np.uint16)
    lot = np.zeros(100_000, np.uint16), np.ones(100_000, np.int64)
    writer.add_flat(*lot)
    tracemalloc.start()
    for _ in range(30):
        writer.add_flat(*lot)
    writer.write_index(Nothing())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20  # 3 million documents; 36 MB if lengths and bounds were held


def test_dataset_reads_any_part_of_any_sequence(store_url: str) -> None:
    docs = [[[1, 2, 3]], [], [[4], [5, 6, 7, 8]]]
    dataset = IndexedDataset(write_tokens(store.join(store_url, "tokens"), docs))
    assert len(dataset) == 3
    assert dataset.num_documents == 3
    assert dataset.dtype == np.uint16
    assert [[s.tolist() for s in doc] for doc in dataset.documents()] == docs
    assert dataset.get(2, 1, 2).tolist() == [6, 7]
    assert dataset.get(2, 4).tolist() == []
    for wrong in ((3, 0, None), (-1, 0, None), (0, 2, 2), (0, -1, None)):
        with pytest.raises(IndexError):
            dataset.get(*wrong)


def test_dataset_pickles_as_its_prefix(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "p", [[list(range(5000))]]))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 500
    assert pickle.loads(pickled).get(0).tolist() == list(range(5000))


def test_no_documents_and_empty_documents_are_files_too(tmp_path: Path) -> None:
    assert IndexedDataset(write_tokens(tmp_path / "none", [])).num_documents == 0
    empty = IndexedDataset(write_tokens(tmp_path / "empty", [[], []]))
    assert (empty.num_documents, len(empty)) == (2, 0)


def test_offsets_go_beyond_32_bits_and_are_made_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CHUNK", 3)
    lengths = np.full(10, 2**31 - 1, dtype=np.int32)
    out = io.BytesIO()
    end = layout.write_offsets(out, lengths, itemsize=4, base=8)
    offsets = np.frombuffer(out.getvalue(), "<i8").tolist()
    assert offsets == [8 + i * 4 * (2**31 - 1) for i in range(10)]
    assert end == 8 + 10 * 4 * (2**31 - 1)


# --- refusals ---------------------------------------------------------------------------------


def test_writer_refuses_tokens_that_do_not_fit() -> None:
    writer = IndexedWriter(io.BytesIO(), np.uint16)
    with pytest.raises(DataError, match="token 65536 does not fit uint16"):
        writer.add_document([[1, 65536]])
    with pytest.raises(DataError, match="token -1 does not fit uint16"):
        writer.add_document([np.array([-1, 3])])


def test_writer_refuses_unknown_types_and_stray_modes() -> None:
    with pytest.raises(DataError, match="complex128"):
        IndexedWriter(io.BytesIO(), np.complex128)
    with pytest.raises(DataError, match="1 modes for 2 sequences"):
        IndexedWriter(io.BytesIO(), np.uint16, multimodal=True).add_document([[1], [2]], [0])
    with pytest.raises(DataError, match="multimodal"):
        IndexedWriter(io.BytesIO(), np.uint16).add_document([[1]], [0])


def test_writer_refuses_lengths_that_do_not_add_up() -> None:
    writer = IndexedWriter(io.BytesIO(), np.uint16)
    ids = np.arange(5, dtype=np.uint32)
    with pytest.raises(DataError, match="add up to 4, not 5"):
        writer.add_flat(ids, [1, 3])
    with pytest.raises(DataError, match="3 sequences in all, but 2"):
        writer.add_flat(ids, [1, 4], [2, 1])
    with pytest.raises(DataError, match="add up"):
        writer.add_flat(ids, [6, -1])
    with pytest.raises(DataError, match="token 70000 does not fit uint16"):
        writer.add_flat(np.array([70_000], np.uint32), [1])
    with pytest.raises(DataError, match="1 modes for 2 sequences"):
        IndexedWriter(io.BytesIO(), np.uint16, multimodal=True).add_flat(ids, [1, 4], None, [1])
    assert (writer.num_documents, writer.num_sequences, writer.num_tokens) == (0, 0, 0)


def damage(data: bytes, offset: int, field: bytes) -> bytes:
    return data[:offset] + field + data[offset + len(field) :]


@pytest.mark.parametrize(
    ("offset", "field", "message"),
    [
        (0, b"PK\x03\x04", "not a Megatron .idx"),
        (9, struct.pack("<Q", 2), "format version 2"),
        (17, b"\x09", "dtype code 9"),
        (18, struct.pack("<Q", 99), "99 sequences"),
        (26, struct.pack("<Q", 0), "0 document bounds"),
        (34, struct.pack("<i", 7), "sequence 1 does not begin"),
        (34, struct.pack("<i", -1), "sequence 0 does not begin"),
        (46, struct.pack("<q", 2), "sequence 0 does not begin"),
        (70, struct.pack("<q", 1), "document bounds run from 1 to 3"),
        (78, struct.pack("<q", 9), "document 1 ends before it begins"),
    ],
)
def test_a_damaged_index_is_refused(offset: int, field: bytes, message: str) -> None:
    _, idx_data = token_bytes([[[1, 2, 3]], [[4], [5, 6, 7]]])
    broken = damage(idx_data, offset, field)
    with pytest.raises(ArtifactError, match=message):
        verify_index(parse_index(np.frombuffer(broken, np.uint8), "p.idx"), "p.idx")


FIELDS = {"length": (34, 4, "<i"), "offset": (46, 8, "<q")}
"""Where the entries of an index of three sequences begin, their size and type."""


@pytest.mark.parametrize("sequence", [0, 1, 2])
@pytest.mark.parametrize(
    ("what", "value"),
    [("offset", 10**9), ("offset", 3), ("offset", -(2**63)), ("length", 2_000_000), ("length", -7)],
)
def test_no_damaged_index_is_opened(tmp_path: Path, sequence: int, what: str, value: int) -> None:
    prefix = write_tokens(tmp_path / "p", [[[1, 2, 3]], [[4], [5, 6, 7]]])
    start, size, kind = FIELDS[what]
    idx = Path(prefix + ".idx")
    field = struct.pack(kind, value)
    idx.write_bytes(damage(idx.read_bytes(), start + sequence * size, field))
    with pytest.raises(DataError, match=r"p\.idx.* sequence \d"):
        IndexedDataset(prefix)


def test_bounds_far_apart_are_seen_to_descend() -> None:
    _, idx_data = token_bytes([[[1, 2, 3]], [[4]], [[5, 6, 7]]])
    far = damage(idx_data, 34 + 3 * 12 + 8, struct.pack("<2q", 2**63 - 1, -2))
    with pytest.raises(ArtifactError, match="document 1 ends before it begins"):
        verify_index(parse_index(np.frombuffer(far, np.uint8), "p.idx"), "p.idx")


def test_checking_an_index_takes_milliseconds_per_million_sequences() -> None:
    lengths = np.full(10**6, 300, np.int32)
    offsets = np.arange(10**6, dtype=np.int64) * 600
    bounds = np.arange(10**6 + 1, dtype=np.int64)
    index = layout.Index(np.dtype(np.uint16), lengths, offsets, bounds, None)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        verify_index(index, "p.idx")
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.1  # about 5 ms; a loop over the sequences takes a second


@pytest.mark.parametrize("keep", [0, 20, 40, -1])
def test_a_cut_index_is_refused(tmp_path: Path, keep: int) -> None:
    prefix = write_tokens(tmp_path / "p", [[[1, 2, 3]], [[4]]])
    whole = Path(prefix + ".idx").read_bytes()
    Path(prefix + ".idx").write_bytes(whole[:keep])
    with pytest.raises(ArtifactError, match=r"p\.idx is \d+ bytes"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("change", [b"", b"\0" * 2])
def test_a_bin_of_the_wrong_size_is_refused(tmp_path: Path, change: bytes) -> None:
    prefix = write_tokens(tmp_path / "p", [[[1, 2, 3]]])
    whole = Path(prefix + ".bin").read_bytes()
    Path(prefix + ".bin").write_bytes(whole + change if change else whole[:-1])
    with pytest.raises(ArtifactError, match=r"p\.bin is \d bytes, but by .*p\.idx it has 6"):
        IndexedDataset(prefix)


def test_a_missing_half_is_refused(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "p", [[[1]]])
    Path(prefix + ".bin").unlink()
    with pytest.raises(ArtifactError, match=r"p\.bin"):
        IndexedDataset(prefix)
