"""A step saved in the background is the step that is saved while one waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.trainyard.checkpoint.samples import contents, save, some_tensors
from trainyard.artifacts import store
from trainyard.artifacts.store import FileRecord
from trainyard.checkpoint.background import BackgroundSave, SaveReport
from trainyard.checkpoint.layout import ShardedTensor
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.ranks import ALONE, Ranks
from trainyard.checkpoint.save import prepare_step
from trainyard.checkpoint.snapshot import HostMemory
from trainyard.checkpoint.steps import find_steps
from trainyard.errors import InfrastructureError
from trainyard.testing.pool import RankPool

STEP = 50


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, writing stands still."""
    opened = threading.Event()

    def wait(operation: str, url: str) -> None:
        if operation == "write" and threading.current_thread().name == "background save":
            assert opened.wait(30)

    monkeypatch.setattr(store, "observers", [wait])
    yield opened
    opened.set()


def begin(
    root: str, tensors: dict[str, torch.Tensor], saving: BackgroundSave, ranks: Ranks = ALONE
) -> list[tuple[list[FileRecord], SaveReport]]:
    """Start to save; returns what will be told when it is done."""
    told: list[tuple[list[FileRecord], SaveReport]] = []
    began = time.monotonic()
    prepared = prepare_step(root, STEP, tensors, "abc", ranks)
    saving.start(prepared, contents(STEP), began, lambda *done: told.append(done))
    return told


def test_what_changes_afterwards_is_not_what_was_saved(
    tmp_path: Path, gate: threading.Event
) -> None:
    tensors = some_tensors()
    expected = save(str(tmp_path / "waited"), tensors)
    saving = BackgroundSave(ALONE)
    told = begin(str(tmp_path / "run"), tensors, saving)
    for tensor in tensors.values():
        tensor.zero_()
    assert find_steps(str(tmp_path / "run")) == []  # and nothing is published before it is whole
    gate.set()
    saving.finish()
    ((records, report),) = told
    assert records == expected
    assert report.step == STEP
    assert report.bytes == sum(record.size_bytes for record in expected)
    assert 0 < report.blocked_seconds < report.durable_seconds
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        for name, tensor in some_tensors().items():
            assert torch.equal(checkpoint.read(name), tensor), name


def test_memory_is_used_again_and_grows_with_what_is_held() -> None:
    memory = HostMemory()
    small = {ShardedTensor.whole("model.a", t).slice: t for t in [torch.arange(5.0)]}
    (first,) = memory.copy(small).parts().values()
    place = first.data_ptr()
    (again,) = memory.copy(small).parts().values()
    assert again.data_ptr() == place
    large = torch.arange(1000, dtype=torch.float64).view(10, 100)
    strange = large.t()[3:7]
    parts = {
        ShardedTensor.whole("model.a", large).slice: large,
        ShardedTensor.whole("model.b", strange).slice: strange,
        ShardedTensor.whole("model.c", torch.tensor(3.0)).slice: torch.tensor(3.0),
        ShardedTensor.whole("model.d", torch.empty(0, 4)).slice: torch.empty(0, 4),
    }
    for part, copy in memory.copy(parts).parts().items():
        assert torch.equal(copy, parts[part]), part.name
        assert copy.data_ptr() % 8 == 0
    memory.free()


def fail_writes(operation: str, url: str) -> None:
    if operation == "write":
        raise InfrastructureError(f"{url}: no space left on device")


def test_what_fails_in_the_background_is_an_error_of_the_run(tmp_path: Path) -> None:
    saving = BackgroundSave(ALONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "observers", [fail_writes])
        told = begin(str(tmp_path / "run"), some_tensors(), saving)
        with pytest.raises(InfrastructureError, match=r"saving step 50: .*no space left"):
            saving.finish()
    assert told == []
    assert find_steps(str(tmp_path / "run")) == []
    saving.finish()  # told once
    begin(str(tmp_path / "run"), some_tensors(), saving)
    saving.finish()
    assert find_steps(str(tmp_path / "run")) == [STEP]


def test_a_failed_run_waits_only_so_long(
    tmp_path: Path, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    saving = BackgroundSave(ALONE)
    begin(str(tmp_path / "run"), some_tensors(), saving)
    saving.give_up(0.05)
    assert "step 50 was still being saved and is lost" in caplog.text
    gate.set()
    saving.give_up(30)
    assert find_steps(str(tmp_path / "run")) == [STEP]


def test_a_failed_run_tells_of_the_save_that_failed_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = BackgroundSave(ALONE)
    monkeypatch.setattr(store, "observers", [fail_writes])
    begin(str(tmp_path / "run"), some_tensors(), saving)
    saving.give_up(30)
    assert "step 50 could not be saved" in caplog.text
    assert "no space left" in caplog.text


def save_beside_training(folder: str) -> float:
    rank = dist.get_rank()
    ranks = Ranks(dist.new_group(backend="gloo"), rank, 2)
    saving = BackgroundSave(ranks)
    tensors = some_tensors()
    begin(f"{folder}/run", tensors, saving, Ranks(dist.group.WORLD, rank, 2))
    total = torch.zeros(1)
    for step in range(50):  # training's own collectives, in another order than the thread's
        part = torch.tensor([float(step)])
        dist.all_reduce(part)
        total += part
    saving.finish()
    return float(total)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_train_on_while_their_threads_save(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(save_beside_training, 2, str(tmp_path)) == [2 * 1225.0] * 2
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        for name, tensor in some_tensors().items():
            assert torch.equal(checkpoint.read(name), tensor), name
