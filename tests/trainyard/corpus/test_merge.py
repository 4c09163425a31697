"""merge(split(x)) == x, in bounded memory, and no half pair, stray file or mixed type."""

from __future__ import annotations

import io
import itertools
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.artifacts import store
from trainyard.corpus.indexed import IndexedWriter
from trainyard.corpus.merge import find_pairs, merge_index, merge_tokens, survey
from trainyard.errors import ArtifactError

Documents = list[list[list[int]]]


def pair(docs: Documents, dtype: str = "uint16", multimodal: bool = False) -> tuple[bytes, bytes]:
    bin_file, idx_file = io.BytesIO(), io.BytesIO()
    writer = IndexedWriter(bin_file, dtype, multimodal)
    for doc in docs:
        writer.add_document(doc)
    writer.write_index(idx_file)
    return bin_file.getvalue(), idx_file.getvalue()


def put(prefix: str, data: tuple[bytes, bytes]) -> str:
    store.write_bytes(prefix + ".bin", data[0])
    store.write_bytes(prefix + ".idx", data[1])
    return prefix


def merged(prefixes: list[str], cache: Path) -> tuple[bytes, bytes]:
    parts = survey(prefixes, cache)
    bin_file, idx_file = io.BytesIO(), io.BytesIO()
    merge_tokens(parts, bin_file)
    merge_index(parts, cache, idx_file)
    return bin_file.getvalue(), idx_file.getvalue()


@settings(max_examples=30, deadline=None)
@given(
    docs=st.lists(st.lists(st.lists(st.integers(0, 999), max_size=3), max_size=3), max_size=9),
    cuts=st.lists(st.integers(0, 9), max_size=3).map(sorted),
    multimodal=st.booleans(),
)
def test_merging_the_parts_gives_the_whole(
    docs: Documents, cuts: list[int], multimodal: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    bounds = [0, *cuts, len(docs)]
    if multimodal and not any(docs):
        return  # without a sequence nothing in the file says multimodal
    pieces = [docs[a:b] for a, b in itertools.pairwise(bounds)]
    if multimodal:
        pieces = [piece for piece in pieces if any(piece)]
        docs = [doc for piece in pieces for doc in piece]
    prefixes = [
        put(str(folder / f"{i:02d}"), pair(piece, multimodal=multimodal))
        for i, piece in enumerate(pieces)
    ]
    assert merged(prefixes, folder) == pair(docs, multimodal=multimodal)


def test_pairs_of_any_store_merge(store_url: str, tmp_path: Path) -> None:
    first, second = [[[1, 2]], []], [[[3], [4, 5]]]
    prefixes = [
        put(store.join(store_url, "a"), pair(first)),
        put(store.join(store_url, "b"), pair(second)),
    ]
    assert merged(prefixes, tmp_path / "cache") == pair(first + second)


def test_more_pairs_merge_than_a_process_may_have_files_open(tmp_path: Path) -> None:
    docs = [[[i]] for i in range(80)]
    prefixes = [put(str(tmp_path / f"{i:04d}"), pair([doc])) for i, doc in enumerate(docs)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 30, hard))
    try:
        assert merged(prefixes, tmp_path) == pair(docs)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- which files ------------------------------------------------------------------------------


def found(names: list[str]) -> list[str]:
    return find_pairs([f"s3://b/parts/{name}" for name in names], "s3://b/parts")


def test_pairs_are_found_sorted_and_what_is_ours_is_passed_over() -> None:
    names = ["b.idx", "a.bin", "a.idx", "b.bin", "a.manifest.json", "manifest.json", ".work/x.bin"]
    names += ["b.claim.json", ".b.tmp", "b.work/unit.bin"]
    assert found(names) == ["s3://b/parts/a", "s3://b/parts/b"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.bin", "a.idx", "b.bin"], r"b\.bin has no b\.idx"),
        (["a.bin", "a.idx", "b.idx"], r"b\.idx has no b\.bin"),
        (["a.bin", "a.idx", "notes.txt"], r"notes\.txt is no half"),
        (["manifest.json"], "no .bin/.idx pair"),
        ([], "no .bin/.idx pair"),
    ],
)
def test_a_folder_that_is_not_pairs_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        found(names)


def test_types_do_not_mix(tmp_path: Path) -> None:
    small = put(str(tmp_path / "a"), pair([[[1]]]))
    large = put(str(tmp_path / "b"), pair([[[1]]], "int32"))
    image = put(str(tmp_path / "c"), pair([[[1]]], multimodal=True))
    with pytest.raises(ArtifactError, match=r"b stores int32, .*a stores uint16"):
        survey([small, large], tmp_path)
    with pytest.raises(ArtifactError, match=r"a is text alone, .*c is multimodal"):
        survey([image, small], tmp_path)


def test_a_damaged_part_is_named_before_anything_is_written(tmp_path: Path) -> None:
    good = put(str(tmp_path / "a"), pair([[[1]]]))
    bad = put(str(tmp_path / "b"), pair([[[1, 2, 3]], [[4]]]))
    data = bytearray(Path(bad + ".idx").read_bytes())
    data[34:38] = np.int32(2).tobytes()
    Path(bad + ".idx").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"b\.idx: sequence 1 is not laid"):
        survey([good, bad], tmp_path)
    put(str(tmp_path / "b"), pair([[[1, 2, 3]], [[4]]]))
    Path(bad + ".bin").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"b\.bin is 0 bytes"):
        survey([good, bad], tmp_path)
