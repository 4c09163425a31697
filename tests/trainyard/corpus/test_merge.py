"""merge(split(x)) == x, in bounded memory and at any size, and no mixed type or damaged part."""

from __future__ import annotations

import io
import itertools
import os
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.corpus.token_files import Documents, put_tokens, token_bytes
from trainyard.artifacts import store
from trainyard.corpus import layout
from trainyard.corpus.indexed import IndexedDataset
from trainyard.corpus.merge import (
    have_provenance,
    merge_index,
    merge_provenance,
    merge_tokens,
    survey,
)
from trainyard.corpus.provenance.origins import Provenance, ProvenanceWriter
from trainyard.errors import ArtifactError, ConfigError

DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 999), max_size=3), max_size=3), max_size=9)


def pair(docs: Documents, dtype: str = "uint16", multimodal: bool = False) -> tuple[bytes, bytes]:
    modes = [[len(sequence) % 2 for sequence in doc] for doc in docs] if multimodal else None
    return token_bytes(docs, dtype, modes)


def merged(prefixes: list[str], cache: Path) -> tuple[bytes, bytes]:
    parts = survey(prefixes, cache)
    bin_file, idx_file = io.BytesIO(), io.BytesIO()
    merge_tokens(parts, bin_file)
    merge_index(parts, cache, idx_file)
    return bin_file.getvalue(), idx_file.getvalue()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    docs=DOCUMENTS, cuts=st.lists(st.integers(0, 9), max_size=3).map(sorted), modes=st.booleans()
)
def test_merging_the_parts_gives_the_whole(
    docs: Documents, cuts: list[int], modes: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    pieces = [docs[a:b] for a, b in itertools.pairwise([0, *cuts, len(docs)])]
    prefixes = [
        put_tokens(str(folder / f"{i:02d}"), pair(piece, multimodal=modes))
        for i, piece in enumerate(pieces)
    ]
    assert merged(prefixes, folder) == pair(docs, multimodal=modes)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(pieces=st.lists(DOCUMENTS, min_size=3, max_size=3))
def test_is_associative(pieces: list[Documents], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("parts")
    a, b, c = (put_tokens(str(folder / name), pair(docs)) for name, docs in zip("abc", pieces))  # noqa: B905
    left = put_tokens(str(folder / "ab"), merged([a, b], folder))
    right = put_tokens(str(folder / "bc"), merged([b, c], folder))
    assert merged([left, c], folder) == merged([a, right], folder) == merged([a, b, c], folder)


def test_pairs_of_any_store_merge(store_url: str, tmp_path: Path) -> None:
    first, second = [[[1, 2]], []], [[[3], [4, 5]]]
    prefixes = [
        put_tokens(store.join(store_url, "a"), pair(first)),
        put_tokens(store.join(store_url, "b"), pair(second)),
    ]
    assert merged(prefixes, tmp_path / "cache") == pair(first + second)


@pytest.mark.slow
def test_more_pairs_merge_than_a_process_may_have_files_open(tmp_path: Path) -> None:
    docs = [[[i]] for i in range(80)]
    prefixes = [put_tokens(str(tmp_path / f"{i:04d}"), pair([doc])) for i, doc in enumerate(docs)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 30, hard))
    try:
        assert merged(prefixes, tmp_path) == pair(docs)
        parts = survey(prefixes, tmp_path)
        with store.open_output(str(tmp_path / "all.bin")) as out:
            merge_tokens(parts, out)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert Path(tmp_path / "all.bin").read_bytes() == pair(docs)[0]


# --- size -------------------------------------------------------------------------------------


def sparse_pair(prefix: str, num_sequences: int, length: int, dtype: Any = np.uint8) -> str:
    """Sequences of zeros, of which the file system keeps nothing."""
    with open(prefix + ".bin", "wb") as out:
        out.truncate(num_sequences * length * np.dtype(dtype).itemsize)
    lengths = np.full(num_sequences, length, np.int32)
    with open(prefix + ".idx", "wb") as idx:
        layout.write_header(idx, np.dtype(dtype), num_sequences, num_sequences + 1)
        layout.write_array(idx, lengths, "<i4")
        layout.write_offsets(idx, lengths, np.dtype(dtype).itemsize)
        layout.write_array(idx, np.arange(num_sequences + 1), "<i8")
    return prefix


def test_offsets_of_parts_beyond_32_bits_follow_each_other(tmp_path: Path) -> None:
    prefixes = [sparse_pair(str(tmp_path / n), 3, 2**31 - 1, np.int32) for n in "ab"]
    parts = survey(prefixes, tmp_path)
    with store.open_output(str(tmp_path / "all.idx")) as out:
        merge_index(parts, tmp_path, out)
    raw = np.fromfile(tmp_path / "all.idx", np.uint8)
    index = layout.parse_index(raw, "all.idx")
    layout.verify_index(index, "all.idx")
    assert index.sequence_offsets.tolist() == [4 * i * (2**31 - 1) for i in range(6)]
    assert index.document_indices.tolist() == list(range(7))
    assert index.bin_bytes == 24 * (2**31 - 1) == sum(part.bin_bytes for part in parts)


@pytest.mark.slow
def test_three_billion_tokens_merge(tmp_path: Path) -> None:
    prefixes = [sparse_pair(str(tmp_path / n), 3, 500_000_003) for n in "ab"]
    with open(prefixes[1] + ".bin", "r+b") as out:
        out.seek(1_400_000_000)
        out.write(b"here")
    parts = survey(prefixes, tmp_path)
    prefix = str(tmp_path / "all")
    with store.open_output(prefix + ".bin") as out:
        merge_tokens(parts, out)
    with store.open_output(prefix + ".idx") as out:
        merge_index(parts, tmp_path, out)
    whole = IndexedDataset(prefix)
    assert len(whole) == 6
    assert int(whole.sequence_lengths.sum(dtype=np.int64)) == 3_000_000_018
    assert whole.get(5, 399_999_993, 6).tolist() == [0, *b"here", 0]


def test_memory_does_not_grow_with_the_index(tmp_path: Path) -> None:
    class Nothing(io.RawIOBase):
        def write(self, data: Any) -> int:
            return len(data)

    prefixes = [sparse_pair(str(tmp_path / str(n)), 400_000, 1) for n in range(3)]
    tracemalloc.start()
    merge_index(survey(prefixes, tmp_path), tmp_path, Nothing())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20  # the indices are 24 MB, several threads hold a chunk of some each


# --- refusals ---------------------------------------------------------------------------------


def test_types_do_not_mix(tmp_path: Path) -> None:
    small = put_tokens(str(tmp_path / "a"), pair([[[1]]]))
    large = put_tokens(str(tmp_path / "b"), pair([[[1]]], "int32"))
    image = put_tokens(str(tmp_path / "c"), pair([[[1]]], multimodal=True))
    nothing = put_tokens(str(tmp_path / "d"), pair([[], []], multimodal=True))
    with pytest.raises(ArtifactError, match=r"b stores int32, .*a stores uint16"):
        survey([small, large], tmp_path)
    with pytest.raises(ArtifactError, match=r"a has only text, but .*c is multimodal"):
        survey([image, small], tmp_path)
    for meant in (False, True):  # neither option would help
        with pytest.raises(ArtifactError, match=r"a has only text, but .*c is multimodal"):
            survey([image, small], tmp_path, multimodal=meant)
    with pytest.raises(ArtifactError, match=r"c\.idx is multimodal; merge it with --multimodal"):
        survey([nothing, image], tmp_path, multimodal=False)
    with pytest.raises(ArtifactError, match=r"a\.idx has only text, .*leave out --multimodal"):
        survey([small, nothing], tmp_path, multimodal=True)
    assert len(survey([nothing, small], tmp_path, multimodal=False)) == 2
    assert len(survey([nothing, image], tmp_path, multimodal=True)) == 2


def test_a_damaged_part_is_named_before_anything_is_written(store_url: str, tmp_path: Path) -> None:
    good = put_tokens(store.join(store_url, "a"), pair([[[1]]]))
    whole = pair([[[1, 2, 3]], [[4]]])
    damaged = bytearray(whole[1])
    damaged[34:38] = np.int32(2).tobytes()
    cases = {
        r"b\.idx: sequence 1 does not begin": (whole[0], bytes(damaged)),
        r"b\.bin is 0 bytes, but by .*b\.idx it has 8": (b"", whole[1]),
        r"b\.bin is 9 bytes": (whole[0] + b"\0", whole[1]),
        r"b\.idx is 20 bytes, less than": (whole[0], whole[1][:20]),
        r"b\.idx is 0 bytes, less than": (whole[0], b""),
    }
    for message, data in cases.items():
        bad = put_tokens(store.join(store_url, "b"), data)
        with pytest.raises(ArtifactError, match=message):
            survey([good, bad, good], tmp_path)


def test_an_index_that_changes_meanwhile_is_named(store_url: str, tmp_path: Path) -> None:
    prefix = put_tokens(store.join(store_url, "a"), pair([[[1, 2]]]))
    parts = survey([prefix], tmp_path / "one")
    put_tokens(prefix, pair([[[1], [2]]]))
    with pytest.raises(ArtifactError, match=r"a\.idx: (changed|ends)"):
        merge_index(parts, tmp_path / "another", io.BytesIO())


# --- where documents came from ----------------------------------------------------------------


def put_docs(prefix: str, source: str, count: int) -> None:
    writer = ProvenanceWriter()
    for k in range(count):
        writer.add(source, 10 * k, 9, k + 1, None)
    with store.open_output(prefix + ".docs") as out:
        writer.write(out)


def test_provenance_is_carried_along_when_every_part_has_it(store_url: str, tmp_path: Path) -> None:
    prefixes = [put_tokens(store.join(store_url, n), pair([[[1]], [[2]]])) for n in "ab"]
    parts = survey(prefixes, tmp_path)
    assert not have_provenance(parts, [])
    names = [prefix + ".docs" for prefix in prefixes]
    put_docs(prefixes[0], "s3://b/one.jsonl", 2)
    with pytest.raises(ConfigError, match=r"a has a \.docs .*b has none.*--drop-provenance"):
        have_provenance(parts, names[:1])
    put_docs(prefixes[1], "s3://b/two.jsonl", 1)
    with pytest.raises(ArtifactError, match=r"b\.docs has 1 documents, but .*b\.idx has 2"):
        have_provenance(parts, names)
    put_docs(prefixes[1], "s3://b/two.jsonl", 2)
    assert have_provenance(parts, names)
    with store.open_output(str(tmp_path / "all.docs")) as out:
        merge_provenance(parts, out, tmp_path)
    whole = Provenance(str(tmp_path / "all.docs"))
    found = [(whole[k].source[-9:], whole[k].line) for k in range(4)]
    assert found == [("one.jsonl", 1), ("one.jsonl", 2), ("two.jsonl", 1), ("two.jsonl", 2)]
