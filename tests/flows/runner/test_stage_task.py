"""The task: a real stage is started, its manifest read back, its failure carried on."""

from __future__ import annotations

import asyncio
import errno
import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger
from prefect.states import Completed, Failed

from flows.backends.outcome import Kind, StageError
from flows.recipes.stage_job import StageJob, stage_job
from flows.recipes.summary import Summary
from flows.runner import cancellation, stage_task
from flows.runner.cancellation import how_to_resume
from flows.runner.stage_task import StageEnvironment, run_stage_task, should_retry
from flows.runner.submission import SETTLED, settle
from tests.flows.disks import fill_with_files, give_room, nothing_written, small_disk
from tests.flows.processes import ROOT
from trainyard.artifacts.output import Output

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageEnvironment:
    monkeypatch.chdir(ROOT)  # a checkout need not be installed
    return StageEnvironment(run_folder=str(tmp_path / "runs"))


def plan(folder: Path, **options: Any) -> StageJob:
    document = {**MODEL, "vocab_size": 300, "world_size": None, "output_dir": str(folder)}
    return stage_job("plan", {**document, **options}, "test")


def run(job: StageJob, site: StageEnvironment) -> Summary:
    with disable_run_logger():
        return asyncio.run(run_stage_task.fn(job, site))


def attempts(site: StageEnvironment, job: str) -> list[Path]:
    return sorted(Path(site.run_folder, job).iterdir())


@pytest.mark.slow
def test_a_stage_runs_is_reused_and_names_reasons(tmp_path: Path, site: StageEnvironment) -> None:
    first = run(plan(tmp_path / "plan"), site)
    assert (first.reused, first.reason) == (False, "there is no manifest yet")
    assert first.metrics["num_parameters"] > 0

    second = run(plan(tmp_path / "plan"), site)
    assert (second.reused, second.output_digest) == (True, first.output_digest)

    third = run(plan(tmp_path / "plan", vocab_size=400), site)
    assert not third.reused
    assert "--vocab-size changed (300 -> 400)" in third.reason


@pytest.mark.slow
def test_an_attempt_has_a_folder(tmp_path: Path, site: StageEnvironment) -> None:
    summary = run(plan(tmp_path / "plan"), site)
    (folder,) = attempts(site, "plan")
    document = tomllib.loads((folder / "config.toml").read_text())
    assert document == {**MODEL, "vocab_size": 300, "output_dir": str(tmp_path / "plan")}
    assert Path(summary.log) == folder / "log.txt"
    assert "plan" in (folder / "log.txt").read_text()


def test_each_submission_keeps_its_document(tmp_path: Path, site: StageEnvironment) -> None:
    scheduled = replace(site, backend="slurm")
    specs = [stage_task._prepare(plan(tmp_path / "plan"), scheduled) for _ in range(12)]
    assert len({spec.run_directory for spec in specs}) == 12
    assert all(Path(spec.run_directory, "config.toml").is_file() for spec in specs)


def test_the_mark_of_a_job_that_has_ended_is_whole_or_not_there(
    tmp_path: Path, site: StageEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled = replace(site, backend="slurm")
    spec = stage_task._prepare(plan(tmp_path / "plan"), scheduled)
    folder = Path(spec.run_directory)

    def full(path: Path, data: bytes) -> int:
        path.open("wb").write(data[:9])
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="no space left"):
            settle(scheduled, spec, Kind.TIME_LIMIT, "too long", (1, 3))
    assert not (folder / SETTLED).exists()
    settle(scheduled, spec, Kind.TIME_LIMIT, "too long", (1, 3))
    recorded = json.loads((folder / SETTLED).read_text())
    assert recorded == {"kind": "time limit", "message": "too long", "shares": [1, 3]}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_files"), [("64k", 1000), ("8m", 4)])
def test_full_folder(tmp_path: Path, site: StageEnvironment, size: str, num_files: int) -> None:
    with small_disk(tmp_path / "disk", size, num_files) as disk:
        fill_with_files(disk)
        full = replace(site, run_folder=str(disk / "runs"))
        with pytest.raises(StageError, match="No space left on device") as caught:
            run(plan(tmp_path / "plan"), full)
        outcome = caught.value.outcome
        assert (outcome.kind, caught.value.exit_status) == (Kind.INFRASTRUCTURE, 3)
        assert "no job was started" in outcome.message
        assert caught.value.log == ""
        assert asyncio.run(should_retry(None, None, Failed(data=caught.value)))  # type: ignore[arg-type]
        give_room(disk)
        assert not run(plan(tmp_path / "plan"), full).reused


def test_impossible_run_folder_is_a_config_error(tmp_path: Path, site: StageEnvironment) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StageError, match="name another run_folder in the profile") as caught:
        run(plan(tmp_path / "plan"), replace(site, run_folder=str(tmp_path / "file" / "runs")))
    assert caught.value.outcome.kind is Kind.CONFIG


def test_a_job_is_cancelled_on_a_full_disk(tmp_path: Path, site: StageEnvironment) -> None:
    never_ends = tmp_path / "python"
    never_ends.write_text("#!/bin/sh\nexec sleep 600\n")
    never_ends.chmod(0o755)
    job = plan(tmp_path / "plan")

    async def cancelled(site: StageEnvironment) -> None:
        going_on = asyncio.create_task(run_stage_task.fn(job, site))
        while not list(Path(site.run_folder).glob("plan/*/events.jsonl")):
            await asyncio.sleep(0.01)
        with nothing_written():
            going_on.cancel()
            with pytest.raises(asyncio.CancelledError):
                await going_on

    with disable_run_logger():
        asyncio.run(cancelled(replace(site, python=str(never_ends))))
    (events,) = Path(site.run_folder).glob("plan/*/events.jsonl")
    assert "ended" not in events.read_text()


@pytest.mark.slow
def test_a_failure_has_class_message_and_log(tmp_path: Path, site: StageEnvironment) -> None:
    document = {"input": [str(tmp_path / "nothing")], "output_prefix": str(tmp_path / "out")}
    with pytest.raises(StageError, match="nothing") as caught:
        run(stage_job("merge", document, "test", "merge-again"), site)
    assert caught.value.exit_status in (1, 2)
    assert caught.value.outcome.name == "merge-again"
    assert "nothing" in Path(caught.value.log).read_text()


def test_success_without_manifest_is_a_defect(tmp_path: Path, site: StageEnvironment) -> None:
    job = StageJob(stage="plan", document={}, output=Output.directory(str(tmp_path / "plan")))
    always_well = Path(tmp_path, "python")
    always_well.write_text("#!/bin/sh\nexit 0\n")
    always_well.chmod(0o755)
    with pytest.raises(StageError, match="does not exist") as caught:
        run(job, StageEnvironment(run_folder=site.run_folder, python=str(always_well)))
    assert caught.value.outcome.kind is Kind.DEFECT


def test_our_own_errors_are_not_tried_again() -> None:
    assert not asyncio.run(should_retry(None, None, Failed(data=KeyError("x"))))  # type: ignore[arg-type]
    assert not asyncio.run(should_retry(None, None, Completed(data=1)))  # type: ignore[arg-type]


def test_the_task_is_named_as_the_job_and_stores_nothing() -> None:
    assert run_stage_task.task_run_name == "{job.name}"
    assert run_stage_task.persist_result is False
    assert StageEnvironment(run_folder="x").python == sys.executable


def test_an_error_names_a_log_only_if_there_is_one(tmp_path: Path, site: StageEnvironment) -> None:
    scheduled = replace(site, backend="slurm")
    spec = stage_task._prepare(plan(tmp_path / "plan"), scheduled)
    folder = Path(spec.run_directory)
    assert stage_task._log_of(spec) == ""
    (folder / "job.sbatch").touch()  # such as one that names a wrong partition
    assert stage_task._log_of(spec, (3,)) == str(folder / "job.sbatch")
    (folder / "log-00003.txt").touch()
    assert stage_task._log_of(spec, (3,)) == str(folder / "log-00003.txt")
    (folder / "log.txt").touch()
    assert stage_task._log_of(spec) == str(folder / "log.txt")


def test_a_stopped_flow_names_the_saved_step(
    tmp_path: Path, site: StageEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancellation, "saved_steps", {})
    monkeypatch.setattr(stage_task, "saved_steps", cancellation.saved_steps)
    spec = stage_task._prepare(plan(tmp_path / "plan"), site)
    assert stage_task._saved(spec) == ""
    assert how_to_resume() == "finished stages are kept; run the same command to resume"
    failure = {"class": "Stopped", "exit_status": 143, "step": 1059}
    Path(spec.run_directory, "failure.json").write_text(json.dumps(failure))
    assert stage_task._saved(spec) == "saved step 1,059"
    assert how_to_resume() == "plan saved step 1,059; run the same command to resume"
