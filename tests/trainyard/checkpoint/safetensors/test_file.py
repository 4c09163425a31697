"""Our safetensors files are those of the safetensors package, and are read by range."""

from __future__ import annotations

import io

import pytest
import safetensors.torch
import torch

from trainyard.artifacts import store
from trainyard.checkpoint.safetensors.file import (
    DTYPES,
    TensorFile,
    spec_of,
    staged,
    tensor_bytes,
    write_tensors,
)


def encode(tensors: dict[str, torch.Tensor]) -> bytes:
    out = io.BytesIO()
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    write_tensors(out, specs, lambda name: tensors[name])
    return out.getvalue()


def test_same_bytes_as_the_safetensors_package() -> None:
    values = torch.randint(0, 2, (4, 6), generator=torch.Generator().manual_seed(3))
    tensors = {f"t.{name}": values.to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(7), "none": torch.empty(0, 3)}
    ours = encode(tensors)
    assert ours == encode(dict(reversed(tensors.items())))
    read = safetensors.torch.load(ours)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert ours == safetensors.torch.save(tensors)


def test_a_slice_is_the_slice_of_the_whole(store_url: str) -> None:
    tensors = {
        "cube": torch.arange(4 * 5 * 6, dtype=torch.float32).view(4, 5, 6),
        "half": torch.arange(30).view(5, 6).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
    }
    url = store.join(store_url, "a.safetensors")
    store.write_bytes(url, encode(tensors))
    with TensorFile(url) as file:
        assert all(torch.equal(file.read(name), tensors[name]) for name in tensors)
        part = file.read_slice("cube", (1, 2, 3), (2, 3, 2))
        assert torch.equal(part, tensors["cube"][1:3, 2:5, 3:5])
        assert part.is_contiguous()
        assert torch.equal(file.read_slice("half", (4, 0), (1, 6)), tensors["half"][4:])
        assert file.read_slice("half", (2, 0), (0, 6)).shape == (0, 6)


@pytest.mark.parametrize("length", [1, 7, 48, 1000])
def test_chunks_through_a_buffer_are_the_bytes(length: int) -> None:
    rows = torch.arange(24, dtype=torch.bfloat16).view(6, 4)[1:]
    for tensor in (rows, torch.tensor(2.5), torch.tensor([True, False]), torch.empty(0, 3)):
        staging = torch.empty(length, dtype=torch.uint8)
        chunks = [bytes(chunk) for chunk in staged(tensor, staging)]
        assert b"".join(chunks) == bytes(tensor_bytes(tensor))
        assert max(map(len, chunks)) <= length
