"""A step saved while a GPU trains on is the step that was saved.

python -m pytest -m gpu tests/gpu"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from tests.stages.directly import run_process
from trainyard.checkpoint.layout import ShardedTensor
from trainyard.checkpoint.snapshot import HostMemory
from trainyard.errors import HostMemoryError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 12
OPTIONS = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 256 --mock-data"
    " --hidden-dropout 0.1 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 4"
    f" --train-iters {STEPS} --eval-iters 0 --lr 1e-3 --split 100,0,0 --bf16"
    " --tokenizer-type NullTokenizer --vocab-size 1000 --save-interval 2 --deterministic-mode"
)


def test_an_update_waits_for_the_copy() -> None:
    large = torch.arange(2**29, dtype=torch.float32, device="cuda")
    turned = torch.arange(12.0, device="cuda").view(3, 4).t()
    host = torch.arange(5)
    parts = {
        ShardedTensor.whole(f"model.{name}", tensor).slice: tensor
        for name, tensor in [("large", large), ("turned", turned), ("host", host)]
    }
    expected = {part.name: tensor.clone() for part, tensor in parts.items()}
    memory = HostMemory()
    memory.reserve(parts)
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        snapshot = memory.copy(parts)
        host_seconds = time.perf_counter() - began
        snapshot.hold_update()
        for tensor in (large, turned):
            tensor.zero_()
        copies = {part.name: copy for part, copy in snapshot.parts().items()}
        for name, tensor in expected.items():
            assert torch.equal(copies[name], tensor.cpu()), name
        stalled, least = snapshot.stalled_seconds(), large.numel() * 4 / 130e9  # no bus is faster
        print(f"copy called in {host_seconds:.4f} s, update stalled {stalled:.4f} s")
        assert host_seconds + stalled >= least
        large.copy_(expected["model.large"])
        turned.copy_(expected["model.turned"])
    memory.free()


def test_memory_that_goes_can_be_locked_again() -> None:
    tensor = torch.arange(100_000.0, device="cuda")
    memory = HostMemory()
    kept = memory.reserve({ShardedTensor.whole("model.a", tensor).slice: tensor})
    del memory  # a run that ended; the next one of the process may be given the same place
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(kept.data_ptr(), kept.numel(), 0)) == 0
    assert int(cudart.cudaHostUnregister(kept.data_ptr())) == 0


def test_memory_that_cannot_be_locked_breaks_no_kernel() -> None:
    tensor = torch.arange(100_000.0, device="cuda")
    memory = HostMemory()
    kept = memory.reserve({ShardedTensor.whole("model.a", tensor).slice: tensor})
    with pytest.raises(HostMemoryError, match="cannot lock"):
        HostMemory()._lock(kept)  # it is already
    assert (tensor * 2).sum().item() > 0


def train(save: Path, *flags: str) -> list[dict[str, float]]:
    run_process("stages.pretrain", *OPTIONS.split(), "--save", str(save), *flags, seconds=250)
    return [json.loads(line) for line in (save / "saves.jsonl").read_text().splitlines()]


def digests(save: Path) -> dict[str, str]:
    """Of every tensor file."""
    found = {}
    for manifest in sorted(save.glob("*/manifest.json")):
        for file in json.loads(manifest.read_text())["files"]:
            if file["path"].endswith(".safetensors"):
                found[f"{manifest.parent.name}/{file['path']}"] = file["digest"]
    return found


def test_steps_are_those_of_a_run_that_waits(tmp_path: Path) -> None:
    train(tmp_path / "waits", "--no-async-save")
    saves = train(tmp_path / "goes on", "--async-save")
    expected = digests(tmp_path / "waits")
    assert len(expected) >= STEPS // 2
    assert digests(tmp_path / "goes on") == expected
    assert [save["step"] for save in saves] == list(range(2, STEPS + 1, 2))
