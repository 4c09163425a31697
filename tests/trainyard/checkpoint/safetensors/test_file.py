"""Our safetensors files are those of the safetensors package, read by range, and not trusted."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch

from trainyard.artifacts import store
from trainyard.checkpoint.safetensors.file import DTYPES, TensorFile, spec_of, write_tensors
from trainyard.errors import ArtifactError


def every_dtype() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, 2, (4, 6), generator=generator)
    return {f"t.{name}": values.to(dtype) for name, dtype in DTYPES.items()}


def encode(tensors: dict[str, torch.Tensor]) -> bytes:
    out = io.BytesIO()
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    write_tensors(out, specs, lambda name: tensors[name])
    return out.getvalue()


def test_same_bytes_as_the_safetensors_package() -> None:
    tensors = {**every_dtype(), "scalar": torch.tensor(7), "none": torch.empty(0, 3)}
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


def hostile(header: object, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\0\0\0", "truncated"),
        (struct.pack("<Q", 2**60), "header of"),
        (struct.pack("<Q", 100), "truncated"),
        (hostile(b"not json"), "not well-formed"),
        (hostile(b"[1]"), "not well-formed"),
        (hostile(b"[" * 50_000), "not well-formed"),
        (hostile({"a": entry(0, 8, dtype="PICKLE")}), "unknown dtype"),
        (hostile({"a": entry(0, 8, shape=(3,))}), "takes 12 bytes"),
        (hostile({"a": entry(0, 8, shape=(-1, -2))}), "not counts"),
        (hostile({"a": entry(-8, 0)}), "not counts"),
        (hostile({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12), "the one before ends"),
        (hostile({"a": entry(4, 12)}, b"\0" * 12), "the one before ends"),
        (hostile({"a": entry(0, 8)}, b"\0" * 6), "truncated"),
        (hostile({"a": entry(0, 8)}, b"\0" * 9), "1 bytes follow"),
    ],
)
def test_a_torn_or_hostile_file_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "model-00001-of-00001.safetensors"
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=words) as caught:
        TensorFile(str(path))
    assert str(path) in str(caught.value)
