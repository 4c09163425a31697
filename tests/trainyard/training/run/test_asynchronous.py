"""Saves are asynchronous where that is asked for, and on GPUs where hosts have room for copies."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainyard.training.small_gpt import TRAINING, build_loop, build_train_module
from trainyard.checkpoint import host_room
from trainyard.checkpoint.background import BackgroundSave
from trainyard.checkpoint.ranks import ALONE
from trainyard.checkpoint.snapshot import HostMemory
from trainyard.errors import HostMemoryError
from trainyard.training.run.checkpointing import Checkpointing, SaveTarget
from trainyard.training.run.node_local_saving import may_be_asynchronous

BOTH, NEVER = [True, True], [False, False]


@pytest.mark.parametrize(
    ("asked", "intervals", "on_cpu_and_gpu"),
    [
        (None, (10, None), [False, True]),
        (None, (None, 10), [False, True]),
        (None, (None, None), NEVER),  # only the last step, which a run waits for
        (True, (None, None), BOTH),
        (True, (10, None), BOTH),
        (False, (10, 10), NEVER),
    ],
)
def test_who_may_save_while_training_runs(
    asked: bool | None, intervals: tuple[int | None, int | None], on_cpu_and_gpu: list[bool]
) -> None:
    config: Any = SimpleNamespace(
        training=replace(TRAINING, async_save=asked, save_interval=intervals[0]),
        non_persistent=SimpleNamespace(non_persistent_save_interval=intervals[1]),
    )
    devices = map(torch.device, ("cpu", "cuda:1"))
    assert [may_be_asynchronous(config, device) for device in devices] == on_cpu_and_gpu


def save_twice(folder: Path, *, needs_room: bool) -> list[bool]:
    """Whether training went on during each save."""
    training = replace(TRAINING, save_interval=2, train_iters=5, eval_iters=0)
    train_module = build_train_module(training)
    saving = Checkpointing(
        SaveTarget(str(folder), "l", "pretrain", {}, {}),
        train_module,
        training.save_interval,
        micro_batch_size=training.micro_batch_size,
        facts={"global_batch_size": 8},
        background=BackgroundSave(ALONE),
        needs_room=needs_room,
    )
    assert build_loop(train_module, training, [saving]).run() == "finished"
    assert [report.step for report in saving.reports] == [2, 4, 5]
    return [report.blocked_seconds < report.durable_seconds for report in saving.reports]


@pytest.mark.parametrize(
    ("free_bytes", "needs_room", "words"),
    [
        (10**12, True, "saves are asynchronous: copies take 0.0 GB of 1000.0 GB of memory"),
        (1, True, "saves are synchronous: copies would take 0.0 GB of 0.0 GB of memory"),
        (1, False, ""),
    ],
    ids=["room", "no room", "asked for"],
)
def test_training_waits_where_a_host_lacks_memory(
    free_bytes: int,
    needs_room: bool,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(host_room, "free_memory_bytes", lambda: (free_bytes, free_bytes))
    with caplog.at_level(logging.INFO):
        went_on = save_twice(tmp_path / "run", needs_room=needs_room)
    is_asynchronous = "synchronous: copies would" not in words
    assert went_on == [is_asynchronous, is_asynchronous, False]
    assert words in caplog.text
    assert ("saves are" in caplog.text) == needs_room


def test_memory_that_cannot_be_locked_is_an_error_only_where_copies_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise HostMemoryError("cannot lock 5 GB")

    monkeypatch.setattr(HostMemory, "reserve", fail)
    monkeypatch.setattr(host_room, "free_memory_bytes", lambda: (10**12, 10**12))
    with pytest.raises(HostMemoryError, match="cannot lock 5 GB"):
        save_twice(tmp_path / "asked", needs_room=False)
    with caplog.at_level(logging.INFO):
        assert save_twice(tmp_path / "run", needs_room=True) == [False] * 3
    assert "saves are synchronous: cannot lock 5 GB" in caplog.text
