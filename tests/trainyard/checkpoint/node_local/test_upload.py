"""Steps of a node copied to the store of their run: whole, or not there."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.checkpoint.samples import contents, save, some_tensors
from trainyard.artifacts import store
from trainyard.artifacts.store import FileRecord
from trainyard.checkpoint.background import SaveReport
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.node_local.save import LazyUpload
from trainyard.checkpoint.ranks import ALONE
from trainyard.checkpoint.save import PreparedStep, prepare_step, write_step
from trainyard.checkpoint.steps import find_steps

Told = list[tuple[list[FileRecord], SaveReport]]
LARGE = 24 << 20
"""Bytes that are more than one block of any store."""


def tensors() -> dict[str, torch.Tensor]:
    large = torch.arange(LARGE // 4, dtype=torch.int32)
    return {**some_tensors(), "optimizer.exp_avg.large": large}


def on_node(folder: Path, step: int = 7) -> PreparedStep:
    prepared = prepare_step(str(folder), step, tensors(), "abc", ALONE)
    write_step(prepared, contents(step), ALONE)
    return prepared


def upload(root_url: str) -> tuple[LazyUpload, Told]:
    told: Told = []
    return LazyUpload(root_url, "abc", ALONE, lambda *done: told.append(done)), told


def wait(copying: LazyUpload) -> None:
    for thread in threading.enumerate():
        if thread.name == "lazy upload":
            thread.join(60)
    assert copying.pinned is None


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The run folder."""
    if request.param == "file":
        return str(tmp_path / "run")
    return store.join(request.getfixturevalue("s3_url"), "run")


def test_a_copy_is_the_step_that_a_save_there_would_have_made(run: str, tmp_path: Path) -> None:
    copying, told = upload(run)
    copying.offer(on_node(tmp_path / "node"), ALONE)
    wait(copying)
    ((records, report),) = told
    expected = save(str(tmp_path / "straight"), tensors(), step=7)
    assert sorted(records, key=repr) == sorted(expected, key=repr)
    assert (report.step, report.kind, report.blocked_seconds) == (7, "upload", 0.0)
    assert report.bytes == sum(record.size_bytes for record in expected)
    with open_checkpoint(run, verify="digests") as checkpoint:
        checkpoint.check()
        assert checkpoint.read("optimizer.exp_avg.large").equal(
            tensors()["optimizer.exp_avg.large"]
        )


@pytest.mark.parametrize("moment", ["open", "write"])
def test_a_copy_that_is_overtaken_leaves_nothing(moment: str, run: str, tmp_path: Path) -> None:
    """As its first file is begun, or amid its bytes."""
    copying, told = upload(run)
    prepared = on_node(tmp_path / "node")

    def overtake(operation: str, url: str) -> None:
        if operation == moment and threading.current_thread().name == "lazy upload":
            copying.overtake(8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "observers", [overtake])
        copying.offer(prepared, ALONE)
        wait(copying)
    assert (told, find_steps(run), store.list_files(run)) == ([], [], {})
    copying.offer(prepared, ALONE)  # of a step that is older than what is there
    wait(copying)
    assert told == []


class Meanwhile:
    """Ranks that agree while the step of a moment ago is published."""

    def __init__(self, published: Callable[[], object]) -> None:
        self._published = published

    def gather(self, produce: Callable[[], bool]) -> list[bool]:
        outcome = produce()
        self._published()
        return [outcome]


def test_a_copy_that_is_overtaken_before_it_begins_leaves_nothing(run: str, tmp_path: Path) -> None:
    copying, told = upload(run)
    ranks: Any = Meanwhile(lambda: copying.overtake(8))
    copying.offer(on_node(tmp_path / "node"), ranks)
    wait(copying)
    assert (told, store.list_files(run)) == ([], {})


def test_a_refusal_of_the_system_is_logged_and_the_next_step_is_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copying, told = upload(str(tmp_path / "run"))

    def broken(operation: str, url: str) -> None:
        if threading.current_thread().name == "lazy upload":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "observers", [broken])
        copying.offer(on_node(tmp_path / "node"), ALONE)
        wait(copying)
    assert "could not copy step 7" in caplog.text
    assert "Input/output error" in caplog.text
    copying.offer(on_node(tmp_path / "node", 9), ALONE)
    wait(copying)
    assert [report.step for _, report in told] == [9]


def test_one_at_a_time_and_none_at_the_end(tmp_path: Path) -> None:
    copying, told = upload(str(tmp_path / "run"))
    first, second = on_node(tmp_path / "node", 7), on_node(tmp_path / "node", 8)
    gate = threading.Event()

    def hold(operation: str, url: str) -> None:
        if operation == "open" and threading.current_thread().name == "lazy upload":
            assert gate.wait(30)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "observers", [hold])
        copying.offer(first, ALONE)
        assert copying.pinned == 7
        copying.offer(second, ALONE)  # left out
        gate.set()
        wait(copying)
    assert [report.step for _, report in told] == [7]
    copying.close()
    copying.offer(second, ALONE)
    assert copying.pinned is None
    assert find_steps(str(tmp_path / "run")) == [7]


def test_what_is_not_what_was_saved_is_not_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copying, told = upload(str(tmp_path / "run"))
    prepared = on_node(tmp_path / "node")
    path = next((tmp_path / "node").glob("*/optimizer-*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    copying.offer(prepared, ALONE)
    wait(copying)
    assert told == []
    assert find_steps(str(tmp_path / "run")) == []
    assert "could not copy" in caplog.text
    assert f"{path}: changed since it was saved" in caplog.text
