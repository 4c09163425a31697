"""Profiles of steps: when they begin and end, and what they leave."""

from __future__ import annotations

import gzip
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import RUN, go
from trainyard.artifacts import store
from trainyard.errors import ConfigError
from trainyard.training.loop.events import NextStep, StepEvent
from trainyard.training.loop.ledger import Ledger, StepRecord
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.throughput import StepTiming
from trainyard.training.options.profile import ProfileConfig
from trainyard.training.watch.profile import StepWindow, build_profiles, moved

CPU = torch.device("cpu")
TRACED: dict[str, Any] = {"profile": True, "use_pytorch_profiler": True}


class Noted(StepWindow):
    """A window that notes what happens."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(ProfileConfig(profile_step_start=first, profile_step_end=last))
        self.notes: list[str] = []

    def start(self) -> None:
        self.notes.append("open")

    def named(self, name: str) -> AbstractContextManager[object]:
        self.notes.append(name)
        return nullcontext()

    def stop(self) -> None:
        self.notes.append("close")


def run_through(window: Noted, first: int, last: int) -> list[str]:
    """Steps after `first` up to `last`."""
    state = TrainState(first)
    window.begin(state)
    for step in range(first + 1, last + 1):
        timing = StepTiming(step, 1.0, 1.0, 1.0, 0.0, 0)
        record, following = StepRecord(step, 0, 0), NextStep(0.0, None, 1.0)
        is_last = step == last
        window.after_step(StepEvent(record, timing, following, state, Ledger(), is_last, False))
    window.end()
    return window.notes


def test_the_steps_after_the_first_up_to_the_last_are_profiled() -> None:
    assert run_through(Noted(2, 4), 0, 6) == ["open", "step 3", "step 4", "close"]
    assert run_through(Noted(0, 1), 0, 3) == ["open", "step 1", "close"]
    resumed = ["open", "step 4", "step 5", "step 6", "close"]
    assert run_through(Noted(2, 9), 3, 5) == resumed, "the run ends while it waits for step 6"
    assert run_through(Noted(2, 4), 4, 6) == [], "it resumed after them"


@pytest.mark.slow
def test_a_trace_is_beside_the_run_and_changes_nothing(tmp_path: Path) -> None:
    tokens = write_pair(tmp_path / "t", [60] * 60)
    window = {"profile_step_start": 2, "profile_step_end": 4}
    assert go(tokens, tmp_path / "plain") == "finished"
    assert go(tokens, tmp_path / "run", **TRACED, **window) == "finished"
    path = tmp_path / "run/logs/profile-rank0000-steps-3-4.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert {"aten::embedding", "step 3", "step 4"} <= names
    assert not names & {"step 2", "step 5"}
    digests = [
        json.loads((tmp_path / name / "manifest.json").read_text())["output_digest"]
        for name in ("plain", "run")
    ]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_a_trace_of_a_run_in_an_object_store_is_moved_there(s3_url: str, tmp_path: Path) -> None:
    config = ProfileConfig(**TRACED, profile_step_start=0, profile_step_end=1)
    name = "profile-rank0000-steps-1-1.json.gz"
    (trace,) = build_profiles(config, 0, CPU, tmp_path, s3_url)
    trace.begin(TrainState(0))
    trace.end()
    assert b"step 1" in gzip.decompress(store.read_bytes(store.join(s3_url, "logs", name)))
    assert not (tmp_path / name).exists()


def test_a_trace_that_cannot_be_moved_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trace").write_bytes(b"1")
    assert moved(tmp_path / "trace", "s4://yard/run") == str(tmp_path / "trace")
    assert "trace stays: s4:// is not" in caplog.text


def test_only_the_named_ranks_are_profiled() -> None:
    config = ProfileConfig(**TRACED, profile_ranks=(1, 3))
    assert build_profiles(config, 0, CPU, Path("logs")) == []
    assert len(build_profiles(config, 3, CPU, Path("logs"))) == 1
    assert build_profiles(ProfileConfig(), 0, CPU, Path("logs")) == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"profile": True}, "nsys, which needs a CUDA device; give --use-pytorch-profiler"),
        ({"record_memory_history": True}, "--record-memory-history needs a CUDA device"),
        ({"use_pytorch_profiler": True}, "--use-pytorch-profiler needs --profile"),
        ({"profile_step_end": 10}, "--profile-step-end 10 must be above --profile-step-start 10"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    asked: dict[str, Any], message: str, tmp_path: Path
) -> None:
    options = {**RUN, "mock_data": True, "dataset_size": 96, **asked}
    with pytest.raises(ConfigError, match=message):
        go("", tmp_path / "run", **{**options, "data_path": []})
    assert not (tmp_path / "run" / "manifest.json").exists()
