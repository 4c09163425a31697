"""Tensors of a GPU are saved as those of the host, in little memory.

python -m pytest -m gpu tests/gpu/test_save.py"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint import resident_bytes
from tests.trainyard.checkpoint.samples import save, some_tensors
from trainyard.checkpoint.safetensors.file import STAGED_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def state() -> dict[str, torch.Tensor]:
    """Tensors from scalars to more than a buffer holds, of several types, parts and turned ones;
    enough for several files to be written at once."""
    generator = torch.Generator().manual_seed(5)
    odd = STAGED_BYTES + 1237
    return {
        **some_tensors(),
        "model.long": torch.randn(2 * STAGED_BYTES // 4 + 3, generator=generator),
        "model.bytes": torch.randint(0, 256, (odd,), generator=generator).to(torch.uint8),
        "model.half": torch.randn(odd, generator=generator).to(torch.bfloat16),
        "model.eighth": torch.randn(1001, 3, generator=generator).to(torch.float8_e4m3fn),
        "model.flags": torch.randn(77, generator=generator) > 0,
        "optimizer.exp_avg.rows": torch.randn(3001, 1024, generator=generator)[1:],
        "optimizer.exp_avg.turned": torch.randn(1024, 1025, generator=generator).t(),
        "optimizer.exp_avg.columns": torch.randn(999, 64, generator=generator)[:, 3:50],
        "optimizer.exp_avg_sq.exact": torch.randn(STAGED_BYTES // 4, generator=generator),
    }


def test_files_are_those_of_the_host(tmp_path: Path) -> None:
    tensors = state()
    expected = save(str(tmp_path / "host"), tensors)
    names = [record.path for record in expected if record.path.endswith(".safetensors")]
    assert len(names) > 1
    for number in range(3):
        found = save(str(tmp_path / f"{number}"), {n: t.cuda() for n, t in tensors.items()})
        assert [r for r in found if not r.volatile] == [r for r in expected if not r.volatile]
    for name in names:
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "host" / name).read_bytes()


def test_values_are_those_after_the_work_that_was_started(tmp_path: Path) -> None:
    weights = torch.zeros(64 << 20, device="cuda")
    for _ in range(200):
        weights += 1.0
    found = save(str(tmp_path / "gpu"), {"model.a": weights, "optimizer.exp_avg.a": weights})
    host = torch.full((64 << 20,), 200.0)
    expected = save(str(tmp_path / "host"), {"model.a": host, "optimizer.exp_avg.a": host})
    assert [r for r in found if not r.volatile] == [r for r in expected if not r.volatile]


def test_host_memory_is_bounded(tmp_path: Path) -> None:
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    tensors = {f"{kind}.a": torch.randn(250_000_000, device="cuda") for kind in kinds}
    save(str(tmp_path / "warm"), some_tensors())
    torch.empty(1, pin_memory=True)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_bytes("VmRSS")
    save(str(tmp_path / "run"), tensors)
    beyond = resident_bytes("VmHWM") - before
    print(f"{beyond / 1e6:.0f} MB beyond the state")
    assert beyond < 300e6
