"""What is read of a file is compared with the digests of its blocks, whatever part is read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from trainyard.artifacts import store
from trainyard.checkpoint.safetensors import blocks
from trainyard.checkpoint.safetensors.blocks import BlockCache, Digests, block_bytes, num_digits
from trainyard.checkpoint.safetensors.file import TensorFile, spec_of, write_tensors
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.errors import ArtifactError

TENSORS = {
    "cube": torch.arange(4 * 5 * 6, dtype=torch.float32).view(4, 5, 6),
    "half": torch.arange(300).view(50, 6).to(torch.bfloat16),
    "none": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
    "wide": torch.arange(600, dtype=torch.int64).view(3, 200),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)


def write(path: Path) -> Digests:
    with store.open_output(str(path)) as out:
        specs = {name: spec_of(tensor) for name, tensor in TENSORS.items()}
        return write_tensors(out, specs, lambda name: TENSORS[name], with_digests=True)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TensorFile, list[int]]:
    """A file that expects its digests, and the bytes of each read of it."""
    digests = write(tmp_path / "a.safetensors")
    file, lengths = TensorFile(str(tmp_path / "a.safetensors")), list[int]()
    read = file._read

    def counting(begin: int, memory: memoryview) -> None:
        lengths.append(len(memory))
        read(begin, memory)

    monkeypatch.setattr(file, "_read", counting)
    file.expect(digests, BlockCache())
    return file, lengths


def test_blocks_are_whole_rows() -> None:
    sizes = {name: block_bytes(spec_of(tensor)) for name, tensor in TENSORS.items()}
    assert sizes == {"cube": 96, "half": 96, "none": 96, "scalar": 100, "wide": 96}
    digits = {name: num_digits(spec_of(tensor)) // 32 for name, tensor in TENSORS.items()}
    assert digits == {"cube": 5, "half": 7, "none": 0, "scalar": 1, "wide": 50}
    assert block_bytes(TensorSpec("F32", (2, 0))) == 100


def test_every_part_is_read_as_it_was_written(counted: tuple[TensorFile, list[int]]) -> None:
    file, _ = counted
    for begin in range(0, file.size_bytes, 17):
        memory = memoryview(bytearray(min(230, file.size_bytes - begin)))
        file.read_into(begin, memory)
        assert memory == Path(file.url).read_bytes()[begin : begin + 230]
    assert all(torch.equal(file.read(name), tensor) for name, tensor in TENSORS.items())
    part = file.read_slice("wide", (1, 30), (2, 9))
    assert torch.equal(part, TENSORS["wide"][1:, 30:39])


def test_bytes_in_order_are_read_once_however_they_are_cut(
    counted: tuple[TensorFile, list[int]],
) -> None:
    file, lengths = counted
    start = min(extent.begin for extent in file.extents.values())
    for begin in range(start, file.size_bytes, 37):
        file.read_into(begin, memoryview(bytearray(min(37, file.size_bytes - begin))))
    assert sum(lengths) == file.size_bytes - start


def test_threads_that_need_the_same_block_read_it_once(
    counted: tuple[TensorFile, list[int]],
) -> None:
    file, lengths = counted
    begin = file.extents["cube"].begin
    with ThreadPoolExecutor(8) as threads:
        for k in range(80):
            threads.submit(file.read_into, begin + k, memoryview(bytearray(9)))
    assert lengths == [96]


def test_each_flipped_bit_is_seen_by_whoever_reads_its_block(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    digests = write(path)
    sound = path.read_bytes()
    with TensorFile(str(path)) as file:
        extents = file.extents
    for key, extent in extents.items():
        for at in range(extent.begin, extent.begin + extent.spec.size_bytes, 61):
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
            step = block_bytes(extent.spec)
            block = (at - extent.begin) // step * step + extent.begin
            last = min(block + step, extent.begin + extent.spec.size_bytes) - 1
            for wanted in (at, block, last):
                with TensorFile(str(path)) as file:
                    file.expect(digests, BlockCache())
                    with pytest.raises(ArtifactError, match=f"safetensors: tensor '{key}' is dama"):
                        file.read_into(wanted, memoryview(bytearray(1)))
                    with pytest.raises(ArtifactError, match=f"bytes {block} to {last + 1} do not"):
                        file.read(key)
