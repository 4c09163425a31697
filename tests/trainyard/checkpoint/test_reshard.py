"""A step in other files holds the same tensors, however it was cut; torch is not needed for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.checkpoint.samples import save
from trainyard.artifacts import store
from trainyard.artifacts.backends import fast_copy
from trainyard.artifacts.store import OutputFile
from trainyard.checkpoint import reshard
from trainyard.checkpoint.layout import LocalTensors, ShardedTensor
from trainyard.checkpoint.safetensors.file import DTYPES
from trainyard.checkpoint.stored_step import open_step
from trainyard.errors import ArtifactError, ConfigError

ROOT = Path(__file__).parents[3]


def cut(name: str, tensor: torch.Tensor, parts: list[int]) -> LocalTensors:
    """A tensor as so many slices along each of its first dims."""
    pieces = [ShardedTensor.whole(name, tensor)]
    for dim, count in enumerate(parts[: tensor.dim()]):
        finer = []
        for piece in pieces:
            begin = piece.offset[dim]
            for part in piece.tensor.tensor_split(count, dim):
                offset = (*piece.offset[:dim], begin, *piece.offset[dim + 1 :])
                finer.append(ShardedTensor(name, part, piece.global_shape, offset))
                begin += part.shape[dim]
        pieces = finer
    return pieces


def rewritten(url: str, target: str, num_shards: int) -> dict[str, bytes]:
    def open_file(name: str) -> AbstractContextManager[OutputFile]:
        return store.open_output(store.join(target, name))

    told = [0]
    with open_step(url, "--load-dir") as step:
        names = reshard.files_written(step, num_shards)
        reshard.rewrite_step(step, num_shards, reshard.read_copied(step), open_file, told.append)
        size = sum(step.spec(name).size_bytes for name in step.names("model."))
    assert sum(told) == size
    assert sorted(names) == sorted(store.list_files(target))
    return {name: store.read_bytes(store.join(target, name)) for name in store.list_files(target)}


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=3),
    parts=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    dtype=st.sampled_from(sorted(DTYPES)),
    num_shards=st.integers(1, 3),
    block_bytes=st.sampled_from([1, 16, 4096]),
    large_row_bytes=st.sampled_from([0, 4096]),
)
def test_cut_in_any_way_it_becomes_what_a_save_of_whole_tensors_is(
    shapes: list[list[int]],
    parts: list[int],
    dtype: str,
    num_shards: int,
    block_bytes: int,
    large_row_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("rewrite")
    whole = {
        f"model.{k}": torch.randint(0, 2, shape).to(DTYPES[dtype]) for k, shape in enumerate(shapes)
    }
    held: dict[str, LocalTensors] = {
        name: cut(name, tensor, parts) for name, tensor in whole.items()
    }
    save(str(folder / "cut"), held)
    save(str(folder / "whole"), whole)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("BLOCK_BYTES", "LOCAL_BLOCK_BYTES"):
            monkeypatch.setattr(reshard, name, block_bytes)
        monkeypatch.setattr(reshard, "LARGE_ROW_BYTES", large_row_bytes)
        monkeypatch.setattr(fast_copy, "BLOCK_BYTES", 4096)  # rows begin in one and end in another
        found, expected = (
            rewritten(str(folder / name), str(folder / f"{name}-again"), num_shards)
            for name in ("cut", "whole")
        )
    assert found == expected


def test_from_a_store_of_objects_it_is_the_same(store_url: str, tmp_path: Path) -> None:
    tensor = torch.randn(64, 96)
    save(store_url, {"model.a": cut("model.a", tensor, [2, 3]), "model.b": torch.arange(7)})
    save(str(tmp_path / "whole"), {"model.a": tensor, "model.b": torch.arange(7)})
    found = rewritten(store_url, str(tmp_path / "one"), 1)
    assert found == rewritten(str(tmp_path / "whole"), str(tmp_path / "two"), 1)


def test_a_file_that_changes_meanwhile_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(str(tmp_path / "run"), {"model.a": torch.zeros(8)})
    (path,) = (tmp_path / "run").rglob("model-*.safetensors")
    with open_step(str(tmp_path / "run"), "--load-dir") as step:
        files = step.files.open(step.files.names)
        monkeypatch.setattr(step.files, "open", lambda names: files)
        path.write_bytes(path.read_bytes() + b"0")
        with pytest.raises(ArtifactError, match=r"safetensors: changed while it was being read"):
            reshard.rewrite_step(step, 1, {}, lambda name: store.open_output(str(tmp_path / name)))


def test_a_file_that_fails_ends_the_others_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(str(tmp_path / "run"), {f"model.{k}": torch.zeros(8) for k in range(6)})
    (tmp_path / "out").mkdir()
    began = threading.Event()

    def open_file(name: str) -> OutputFile:
        if name.startswith("model-00002"):
            began.wait(10)
            raise ConfigError("no room for the second")
        return store.open_output(str(tmp_path / "out" / name))

    def fill(self: OutputFile, size: int, fill: object, on_bytes: Callable[[int], object]) -> None:
        began.set()
        while True:  # a file without end
            on_bytes(1)

    monkeypatch.setattr(OutputFile, "append_filled", fill)
    with (
        open_step(str(tmp_path / "run"), "--load-dir") as step,
        pytest.raises(ConfigError, match="no room"),
    ):
        reshard.rewrite_step(step, 6, reshard.read_copied(step), open_file)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_neither_torch_nor_numpy_is_imported_to_move_bytes() -> None:
    modules = "stages.runtime.cli, stages.runtime.execute, stages.reshard.run"
    program = f"import sys, {modules}; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "trainyard.checkpoint.reshard" in done.stdout.split()
    assert {"torch", "numpy"}.isdisjoint(done.stdout.split())
