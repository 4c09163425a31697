"""Equal checkpoints have no differences, whatever their layouts; of others the largest is found."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainyard.checkpoint.hostile import edited
from tests.trainyard.checkpoint.samples import save, some_tensors
from trainyard.checkpoint import compare
from trainyard.checkpoint.compare import (
    KeyDifference,
    TensorDifference,
    compare_documents,
    compare_tensors,
    slices,
)
from trainyard.checkpoint.load import open_checkpoint


def between(
    tmp_path: Path, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
) -> list[TensorDifference]:
    save(str(tmp_path / "ours"), ours)
    save(str(tmp_path / "theirs"), theirs, shard_size_bytes=100)
    with (
        open_checkpoint(str(tmp_path / "ours")) as a,
        open_checkpoint(str(tmp_path / "theirs")) as b,
    ):
        return list(compare_tensors(a, b))


def check(found: TensorDifference, differing: int, largest: tuple[float, tuple[int, ...]]) -> None:
    assert found.differing == differing
    assert found.absolute is not None
    assert (found.absolute.difference, found.absolute.index) == largest


def test_other_files_are_no_difference(tmp_path: Path) -> None:
    assert between(tmp_path, some_tensors(), some_tensors()) == []


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 40))
def test_slices_cover_each_element_once(shape: list[int], most: int) -> None:
    counts = torch.zeros(shape)
    for offset, extent in slices(shape, most):
        assert math.prod(extent) <= most
        box = counts
        for dim, (begin, length) in enumerate(zip(offset, extent, strict=True)):
            box = box.narrow(dim, begin, length)
        box += 1
    assert bool((counts == 1).all())


@pytest.mark.parametrize("slice_elements", [1 << 20, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_the_largest_differences_and_their_places_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_elements: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(slices, "__defaults__", (slice_elements,))
    ours = torch.arange(1, 31).view(5, 6).to(dtype)
    theirs = ours.clone()
    theirs[0, 1] += 3  # 2 -> 5: the largest of its size
    theirs[4, 5] += 8  # 30 -> 38: the largest
    theirs[2, 2] -= 1
    (found,) = between(tmp_path, {"model.a": ours}, {"model.a": theirs})
    check(found, 3, (8.0, (4, 5)))
    assert found.absolute is not None
    assert (found.absolute.ours, found.absolute.theirs) == (30.0, 38.0)
    assert found.relative is not None
    assert (found.relative.difference, found.relative.index) == (0.6, (0, 1))


def test_one_bit_of_any_type_is_a_difference(tmp_path: Path) -> None:
    names = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
    names += [torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool]
    ours = {f"model.{dtype}": torch.tensor([1, 0, 1]).to(dtype) for dtype in names}
    theirs = {name: tensor.clone() for name, tensor in ours.items()}
    for tensor in theirs.values():
        tensor.view(torch.uint8)[-1] ^= 1
    found = between(tmp_path, ours, theirs)
    assert [f.name for f in found] == sorted(ours)
    assert all(f.differing == 1 and f.absolute and f.absolute.index == (2,) for f in found)
    assert all(f.absolute and f.absolute.difference > 0 for f in found)


def test_zeros_of_two_signs_differ_in_bits_alone(tmp_path: Path) -> None:
    (found,) = between(
        tmp_path, {"model.a": torch.tensor([1.0, 0.0])}, {"model.a": torch.tensor([1.0, -0.0])}
    )
    check(found, 1, (0.0, (1,)))


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        (math.nan, 1.0, math.inf),
        (math.inf, 1.0, math.inf),
        (math.inf, -math.inf, math.inf),
        (1.0, math.inf, math.inf),
    ],
)
def test_what_is_no_number_differs_by_infinity(
    tmp_path: Path, ours: float, theirs: float, difference: float
) -> None:
    both = [1.0, math.nan, math.inf]
    (found,) = between(
        tmp_path,
        {"model.a": torch.tensor([*both, ours])},
        {"model.a": torch.tensor([*both, theirs])},
    )
    check(found, 1, (difference, (3,)))
    assert found.relative is not None
    assert found.relative.difference == math.inf


def test_tensors_of_one_shape_and_two_types_are_compared_by_value(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 1.0 + 2**-10])
    (found,) = between(tmp_path, {"model.a": values}, {"model.a": values.to(torch.bfloat16)})
    check(found, 1, (2**-10, (1,)))
    exact = torch.tensor([1.0, 2.0])
    (found,) = between(tmp_path, {"model.a": exact}, {"model.a": exact.to(torch.bfloat16)})
    assert (found.differing, found.absolute) == (0, None)


def test_tensors_of_one_side_and_other_shapes_are_listed(tmp_path: Path) -> None:
    found = between(
        tmp_path,
        {"model.a": torch.ones(2), "model.b": torch.ones(2), "model.same": torch.ones(1)},
        {"model.b": torch.ones(1, 2), "model.c": torch.ones(2), "model.same": torch.ones(1)},
    )
    sides = [(f.name, f.ours and f.ours.shape, f.theirs and f.theirs.shape) for f in found]
    assert sides == [("model.a", (2,), None), ("model.b", (2,), (1, 2)), ("model.c", None, (2,))]


def test_no_more_than_a_slice_of_each_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    read_slice = compare.Checkpoint.read_slice

    def noting(self: compare.Checkpoint, *box: object) -> torch.Tensor:
        tensor = read_slice(self, *box)  # type: ignore[arg-type]
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(compare.Checkpoint, "read_slice", noting)
    monkeypatch.setattr(slices, "__defaults__", (50,))
    large = torch.arange(1000.0).view(10, 100)
    (found,) = between(tmp_path, {"model.a": large}, {"model.a": large + 1})
    assert found.differing == 1000
    assert max(read) == 50
    assert sum(read) == 2000


def test_documents_differ_by_key(tmp_path: Path) -> None:
    tensors = {"model.a": torch.ones(1)}
    models = {"ours": {"a": 1, "b": {"c": [1]}}, "theirs": {"a": 1.0, "b": {"d": 2}}}
    for side, model in models.items():
        files = {"ledger.jsonl": side.encode(), "tokenizer/vocab.json": b"same"}
        documents = {"config.json": {"model": model}}
        save(str(tmp_path / side), tensors, documents=documents, files=files)
    step = tmp_path / "theirs" / "iter_0000050"
    edited(step, "state.json", lambda state: state.update(consumed_samples=7))
    ours, theirs = (open_checkpoint(str(tmp_path / side)) for side in ("ours", "theirs"))
    assert list(compare_documents(ours, ours)) == []
    *keys, ledger_difference = compare_documents(ours, theirs)
    assert keys == [
        KeyDifference("state.json", "consumed_samples", 200, 7),
        KeyDifference("config.json", "model.a", 1, 1.0),
        KeyDifference("config.json", "model.b.c", [1], None, "ours"),
        KeyDifference("config.json", "model.b.d", None, 2, "theirs"),
    ]
    assert (ledger_difference.document, ledger_difference.key) == ("files", "ledger.jsonl")
