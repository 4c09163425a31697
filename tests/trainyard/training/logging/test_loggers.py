"""Where figures go: the console, JSON lines, TensorBoard, Weights & Biases, plug-ins."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.training.small_gpt import (
    TRAINING,
    Collector,
    ScalarWriter,
    build_loop,
    build_train_module,
)
from trainyard.checkpoint.background import SaveReport
from trainyard.errors import ConfigError
from trainyard.models.costs.flops import MODEL_FLOPS
from trainyard.training.logging.console import training_line
from trainyard.training.logging.jsonl import JsonLines
from trainyard.training.logging.loggers import Guarded, build_loggers
from trainyard.training.logging.run_info import RunInfo
from trainyard.training.logging.scalars import step_scalars
from trainyard.training.logging.tensorboard import TensorBoard
from trainyard.training.loop.events import Callback, NextStep, StepEvent
from trainyard.training.loop.ledger import Ledger, StepRecord
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.throughput import StepTiming, peak_tflops
from trainyard.training.options.logging import LoggingConfig

INFO = RunInfo(
    *(6, 48, 12),
    world_size=2,
    device_name="NVIDIA H100 80GB HBM3",
    save="runs/tiny",
    flops=MODEL_FLOPS,
)


def event(step: int, **fields: Any) -> StepEvent:
    record = StepRecord(step, 8 * step, 96 * step, 8, **fields)
    timing = StepTiming(step, 500.0, 4000.0, 494.7, 25.0, 2**30)
    next_step = NextStep(9e-4, loss_scale=fields.get("loss_scale", 1.0) / 2)
    return StepEvent(record, timing, next_step, TrainState(step), Ledger(), step == 6, False)


def taken(step: int, **fields: Any) -> StepEvent:
    return event(step, lm_loss=2.0, learning_rate=1e-3, grad_norm=0.5, **fields)


# --- console ----------------------------------------------------------------------------------


def test_the_line_has_megatrons_fields_and_figures_per_gpu() -> None:
    events = [taken(1), taken(2, loss_scale=1024.0, num_zeros=3, params_norm=7.0)]
    line = training_line(events, INFO, True, "2026-01-01 00:00:00")
    assert line == (
        " [2026-01-01 00:00:00] iteration        2/       6 | consumed samples:           16 | "
        "elapsed time per iteration (ms): 500.0 | tokens per GPU (tokens/s/GPU): 2000.0 | "
        "throughput per GPU (TFLOP/s/GPU): 494.7 | MFU (% of dense bf16 peak): 50.0 | "
        "FLOP convention: 6N+causal | "
        "learning rate: 9.000000E-04 | global batch size:     8 | lm loss: 2.000000E+00 | "
        "loss scale: 512.0 | grad norm: 0.500 | num zeros: 3 | params norm: 7.000 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | data wait (%): 5.0 | "
        "time left: 0:00:02 |"
    )


def test_a_decoupled_rate_follows_the_learning_rate() -> None:
    made = replace(taken(1), next_step=NextStep(9e-4, 1e-4))
    line = training_line([made], INFO, False, "2026-01-01 00:00:00")
    assert " learning rate: 9.000000E-04 | decoupled learning rate: 1.000000E-04 | " in line
    found = {scalar.tag: scalar.value for scalar in step_scalars(made, LoggingConfig(), INFO)}
    assert (found["learning-rate"], found["decoupled-learning-rate"]) == (9e-4, 1e-4)


def test_skipped_steps_are_counted_and_not_averaged() -> None:
    nan = event(2, learning_rate=1e-3, skipped=True)
    overflow = event(3, lm_loss=100.0, learning_rate=1e-3, skipped=True, loss_scale=2.0)
    passed = event(4, passed_over=True)
    line = training_line([taken(1), nan, overflow, passed], INFO, False, "now")
    assert "lm loss: 2.000000E+00 |" in line
    assert "number of skipped iterations:   2 | number of nan iterations:   1 |" in line
    assert "learning rate" not in line  # the last one was passed over
    assert "lm loss" not in training_line([passed], INFO, True, "now")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA H20", 148.0),
        ("cpu", None),
    ],
)
def test_the_peak_is_looked_up_by_device_name(name: str, tflops: float | None) -> None:
    assert peak_tflops(name) == tflops


# --- files ------------------------------------------------------------------------------------


def test_json_lines_resume_after_the_last_valid_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    (sink,) = (
        s for s in build_loggers(LoggingConfig(metrics_jsonl=str(path)), INFO) if s.name == "jsonl"
    )
    build_loop(build_train_module(), callbacks=[sink]).run()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {"lm_loss", "tokens_per_second_per_gpu", "mfu", "data_wait_ms", "ms"} <= set(lines[0])
    assert "validation_loss" in lines[2]
    with path.open("a") as file:
        file.write('{"step": 6')  # torn
    again = JsonLines(path, INFO)
    again.begin(TrainState(step=4))
    again.after_step(taken(5))
    again.end()
    assert [json.loads(s)["step"] for s in path.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_tensorboard_has_megatrons_tags_on_both_axes() -> None:
    writer = ScalarWriter()
    config = LoggingConfig(
        tensorboard_log_interval=2,
        log_validation_ppl_to_tensorboard=True,
        log_world_size_to_tensorboard=True,
    )
    info = replace(INFO, gauges={"forward-backward-time": 0.25})
    sink = TensorBoard(writer, config, info)
    for step in (1, 2):
        sink.after_step(taken(step, num_zeros=3, params_norm=7.0))
    sink.after_step(taken(3, validation_loss=2.0))
    by_step = {tag: step for tag, _, step in writer.scalars if " vs samples" not in tag}
    by_samples = {tag: step for tag, _, step in writer.scalars if " vs samples" in tag}
    assert by_step == {
        **dict.fromkeys(("learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm"), 2),
        **dict.fromkeys(("num-zeros", "params-norm", "world-size", "samples vs steps"), 2),
        **dict.fromkeys(("iteration-time", "throughput", "tokens-per-second-per-gpu"), 2),
        **dict.fromkeys(("data-wait-share", "mfu", "forward-backward-time"), 2),
        **dict.fromkeys(("lm loss validation", "lm loss validation ppl"), 3),
    }
    assert by_samples["lm loss vs samples"] == 16
    assert by_samples["lm loss validation ppl vs samples"] == 24


@pytest.mark.slow
def test_tensorboard_files_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoggingConfig(tensorboard_dir=str(tmp_path))
    sinks = build_loggers(config, INFO)
    build_loop(build_train_module(), callbacks=sinks).run()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [entry.step for entry in found.Scalars("lm loss")] == [1, 2, 3, 4, 5, 6]
    assert [entry.step for entry in found.Scalars("lm loss vs samples")] == list(range(8, 49, 8))
    assert [entry.step for entry in found.Scalars("lm loss validation")] == [3, 6]


@pytest.mark.slow
def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = LoggingConfig(wandb_project="yard", wandb_save_dir=str(tmp_path))
    sinks = [sink for sink in build_loggers(config, INFO) if sink.name == "wandb"]
    build_loop(build_train_module(), callbacks=sinks).run()
    assert sinks[0].num_failures == 0
    wandb.teardown()  # a process of its own writes the file, at the latest when this one ends
    (file,) = tmp_path.rglob("run-*.wandb")
    assert b"lm loss validation" in file.read_bytes()


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("torch.utils.tensorboard", {"tensorboard_dir": "somewhere"}),
        ("wandb", {"wandb_project": "yard"}),
    ],
)
def test_a_logger_without_its_package_is_refused(
    module: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"needs the package .* pip install '\.\[logging"):
        build_loggers(LoggingConfig(**options), INFO)  # type: ignore[arg-type]


# --- plug-ins and failures --------------------------------------------------------------------

PLUG_IN = """
from trainyard.training.loop.events import Callback

SEEN = []

class InHouse(Callback):
    def after_step(self, event):
        SEEN.append(event.record.step)

def make(config, info):
    return InHouse() if info.rank == 0 else None
"""


def test_a_package_adds_a_logger_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in_house_logs.py").write_text(PLUG_IN)
    info = tmp_path / "in_house-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: in-house\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trainyard.loggers]\nin-house = in_house_logs:make\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sinks = build_loggers(LoggingConfig(loggers=("in-house",)), INFO)
    assert [sink.name for sink in sinks] == ["console", "in-house"]
    build_loop(build_train_module(), callbacks=sinks[1:]).run()
    assert sys.modules["in_house_logs"].SEEN == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match=r"--loggers elsewhere.*console, in-house, jsonl"):
        build_loggers(LoggingConfig(loggers=("elsewhere",)), INFO)


class Broken(Callback):
    """Fails now and then."""

    def after_step(self, event: StepEvent) -> None:
        if event.record.step in (2, 4):
            raise OSError(28, "No space left on device")


def test_a_failing_logger_loses_only_its_own_lines(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector([])
    assert build_loop(build_train_module(), callbacks=[Guarded("x", Broken()), collector]).run()
    assert len(collector.events) == 6
    first, last = (r.getMessage() for r in caplog.records if "logger" in r.msg)
    assert "failed at step 2" in first
    assert "failed 2 times" in last


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"log_interval": 0}, "--log-interval"),
        ({"memory_monitor_interval": 0.0}, "--memory-monitor-interval"),
        ({"wandb_entity": "us"}, "--wandb-project"),
        ({"metrics_jsonl": "s3://bucket/file"}, "--metrics-jsonl"),
    ],
)
def test_invalid_logging_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LoggingConfig(**options)


def test_memory_is_logged_only_for_cuda_devices() -> None:
    from trainyard.training.logging.scalars import memory_scalars

    assert memory_scalars(torch.device("cpu")) == []
    assert TRAINING.manual_gc is False


# --- saves --------------------------------------------------------------------------------------


def test_the_cost_of_a_save_is_logged_once_it_is_known(tmp_path: Path) -> None:
    info = replace(INFO, saves=[])
    lines = JsonLines(tmp_path / "m.jsonl", info)
    board = TensorBoard(writer := ScalarWriter(), LoggingConfig(), info)
    first = SaveReport(1, 2_000_000_000, 0.5, 4.0)
    local = SaveReport(2, 1_000_000_000, 0.25, 0.5, "local")
    for sink in (lines, board):
        sink.begin(TrainState())
    for step, done in ((1, []), (2, [first]), (3, []), (6, [])):
        info.saves.extend(done)
        for sink in (lines, board):
            sink.after_step(taken(step))
    info.saves.append(local)
    for sink in (lines, board):
        sink.end()
    found = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    costs = [(line["step"], line["saves"]) for line in found if "saves" in line]
    assert costs == [(2, [first.document()]), (2, [local.document()])]
    entered = {(t, s): v for t, v, s in writer.scalars if t.startswith("save")}
    assert entered == {
        ("save-blocked-time", 1): 0.5,
        ("save-durable-after-time", 1): 4.0,
        ("save-gigabytes", 1): 2.0,
        ("save-gigabytes-per-second", 1): 0.5,
        ("save-local-blocked-time", 2): 0.25,
        ("save-local-durable-after-time", 2): 0.5,
        ("save-local-gigabytes", 2): 1.0,
        ("save-local-gigabytes-per-second", 2): 2.0,
    }
