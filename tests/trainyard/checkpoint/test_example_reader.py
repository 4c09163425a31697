"""The checkpoint reader of docs/examples works, with nothing of trainyard."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainyard.checkpoint.samples import save, some_tensors

READER = Path(__file__).resolve().parents[3] / "docs/examples/read_checkpoint.py"


def test_the_reader_reads_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = some_tensors()
    save(str(tmp_path / "run"), {"model.old": torch.ones(2)}, step=50)
    save(str(tmp_path / "run"), tensors, step=100, shard_size_bytes=300)
    (tmp_path / "run" / "iter_0000150").mkdir()
    monkeypatch.setattr(sys, "argv", [str(READER), str(tmp_path / "run" / "iter_0000050")])
    read = runpy.run_path(str(READER))["read_checkpoint"](str(tmp_path / "run"), prefix="")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert READER.read_text().count("\n") <= 40
    assert "trainyard" not in READER.read_text()


@pytest.mark.parametrize("manifest", [None, '{"status": "replacing"}'])
def test_the_reader_takes_no_torn_save_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: str | None
) -> None:
    run = tmp_path / "run"
    save(str(run), {"model.a": torch.ones(2)}, step=50)
    monkeypatch.setattr(sys, "argv", [str(READER), str(run)])
    read = runpy.run_path(str(READER))["read_checkpoint"]
    torn = run / "iter_0000100"
    save(str(run), {"model.a": torch.zeros(2)}, step=100)
    if manifest is None:
        (torn / "manifest.json").unlink()
    else:
        (torn / "manifest.json").write_text(manifest)
    assert torch.equal(read(str(run))["model.a"], torch.ones(2))
    with pytest.raises(AssertionError, match="no save that was finished"):
        read(str(torn))
    (run / "iter_0000050" / "manifest.json").unlink()
    with pytest.raises(AssertionError, match="no save that was finished"):
        read(str(run))


@pytest.mark.slow
def test_the_reader_is_a_program(tmp_path: Path) -> None:
    save(str(tmp_path / "run"), {"model.a": torch.ones(2, 3)})
    done = subprocess.run(
        [sys.executable, str(READER), str(tmp_path / "run")], capture_output=True, text=True
    )
    assert done.stdout == "model.a (2, 3) torch.float32\n", done.stderr
