"""Every slice is written once, by somebody who holds it, and the files come out level."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.checkpoint.index import TensorEntry, TensorPiece, encode_index, fault, parse_index
from trainyard.checkpoint.plan import Slice, assign, entries_of, plan_files, split_large
from trainyard.errors import ArtifactError


def whole(name: str, *shape: int) -> Slice:
    return Slice(f"model.{name}", "F32", shape, (0,) * len(shape), shape)


SIZES = [900, 400, 400, 300, 120, 80, 80, 40, 10, 10, 1]
SLICES = [whole(f"t{index}", size) for index, size in enumerate(SIZES)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_replicated_slices_are_written_once_and_balanced(world_size: int) -> None:
    assigned = assign([SLICES] * world_size)
    assert sorted(item.name for items in assigned for item in items) == sorted(
        item.name for item in SLICES
    )
    loads = [sum(item.size_bytes for item in items) for items in assigned]
    fair = sum(loads) / world_size
    largest = max(item.size_bytes for item in SLICES)
    assert max(loads) <= max(largest, 1.34 * fair)  # the bound of largest-first


def test_a_slice_goes_to_a_rank_that_holds_it() -> None:
    shared, mine, yours = whole("shared", 5), whole("mine", 9), whole("yours", 2)
    assert assign([[shared, mine], [yours, shared]]) == [[mine], [shared, yours]]


def test_the_plan_does_not_depend_on_the_order_of_the_tensors() -> None:
    assert plan_files("model", [SLICES] * 3) == plan_files("model", [SLICES[::-1]] * 3)


def test_a_large_tensor_is_cut_by_rows_and_files_keep_the_limit() -> None:
    parts = split_large(whole("big", 10, 25), limit_bytes=350)
    assert [(p.offset, p.shape) for p in parts] == [
        ((0, 0), (2, 25)),
        ((2, 0), (3, 25)),
        ((5, 0), (2, 25)),
        ((7, 0), (3, 25)),
    ]
    files = plan_files("model", [parts], limit_bytes=350)
    assert [file.name for file in files] == [
        f"model-{k:05d}-of-00004.safetensors" for k in range(1, 5)
    ]
    assert parts[1].key == "model.big@2,0"
    assert fault(entries_of(files)["model.big"]) is None
    assert split_large(whole("row", 1, 999), limit_bytes=10) == [whole("row", 1, 999)]


def entry(
    *boxes: tuple[tuple[int, ...], tuple[int, ...]], file: str = "a.safetensors"
) -> TensorEntry:
    pieces = tuple(
        TensorPiece(file, f"k{i}", offset, shape) for i, (offset, shape) in enumerate(boxes)
    )
    return TensorEntry("F32", (4, 6), pieces)


def test_an_index_is_read_back() -> None:
    entries = {"model.a": entry(((0, 0), (4, 2)), ((0, 2), (4, 4)))}
    document = json.loads(encode_index(entries))
    assert parse_index(document, "index.json") == entries


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (entry(((0, 0), (4, 3))), "hold 12 of 24"),
        (entry(), "hold 0 of 24"),
        (entry(((0, 0), (4, 4)), ((0, 2), (4, 2)), ((0, 0), (0, 6))), "overlap"),
        (entry(((0, 0), (3, 6)), ((2, 0), (2, 3))), "overlap"),
        (entry(((0, 0), (4, 6)), ((0, 0), (4, 6))), "overlap"),
        (entry(((0, 0), (5, 6))), "outside the tensor"),
        (entry(((0,), (24,))), "has 1 dims"),
        (entry(((0, 0), (4, 6)), file="../a.safetensors"), "not a plain"),
        (entry(((0, 0), (4, 6)), file="/etc/passwd"), "not a plain"),
        (entry(((0, 0), (4, 6)), file="sub/a.safetensors"), "not a plain"),
        (entry(((0, 0), (4, 6)), file="a.pt"), "not a plain"),
        (TensorEntry("PICKLE", (4,), (TensorPiece("a.safetensors", "k", (0,), (4,)),)), "dtype"),
    ],
)
def test_an_index_that_is_not_an_exact_cover_is_refused(broken: TensorEntry, words: str) -> None:
    document = json.loads(encode_index({"model.a": broken}))
    with pytest.raises(ArtifactError, match=words) as caught:
        parse_index(document, "x/index.json")
    assert "x/index.json: tensor 'model.a'" in str(caught.value)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"format_version": 2, "tensors": {}}, "newer than 1"),
        ({"tensors": {}}, "no format_version"),
        ([], "no format_version"),
        ({"format_version": 1, "tensors": {"a": {"dtype": "F32"}}}, "not an index"),
        (
            {"format_version": 1, "tensors": {"a": {"dtype": "F32", "shape": [-1], "pieces": []}}},
            "not a list of counts",
        ),
    ],
)
def test_a_document_that_is_no_index_is_refused(document: object, words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        parse_index(document, "index.json")


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 4), min_size=2, max_size=6))
def test_pieces_overlap_exactly_when_two_of_them_share_an_element(
    sides: list[tuple[int, int, int, int]],
) -> None:
    boxes = [((a, b), (c, d)) for a, b, c, d in sides]
    pieces = tuple(TensorPiece("a.safetensors", f"k{i}", *box) for i, box in enumerate(boxes))
    elements = [
        (row, column)
        for (a, b), (c, d) in boxes
        for row in range(a, a + c)
        for column in range(b, b + d)
    ]
    reason = fault(TensorEntry("F32", (10, 10), pieces))
    assert ("overlap" in str(reason)) == (len(set(elements)) < len(elements))
