"""The account as it is gathered from run folders and artifacts, and kept."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from flows.backends.events import Event, record_event
from flows.backends.process import ProcessJob
from flows.backends.spec import LaunchSpec
from flows.goodput.account import KINDS, Submission
from flows.goodput.report import (
    attempt_of,
    goodput_url,
    last_run,
    main,
    markdown,
    read_submissions,
    record_goodput,
    submission_of,
)
from tests.stages.pretrain_runs import arguments
from tests.trainyard.datasets.test_gpt import write_pair
from trainyard.artifacts import store
from trainyard.artifacts.output import Output

ATTEMPT = {
    "began": 105.0,
    "ranks": 4,
    "from_step": 0,
    "loop_began": 110.0,
    "marks": [{"step": 10, "time": 190.0, "step_seconds": 80.0}],
    "ended": 195.0,
    "outcome": "finished",
}


def submit(folder: Path, begin: float, end: float | None, kind: str = "done") -> Path:
    record_event(folder, "submitted", at=begin - 20.0)
    record_event(folder, "started", at=begin)
    if end is not None:
        record_event(folder, "ended", at=end, kind=kind)
    return folder


def finish(run: Path) -> Output:
    run.mkdir()
    (run / "attempts.json").write_text(json.dumps([ATTEMPT]))
    return Output.directory(str(run))


def test_an_account_survives_the_removal_of_run_folders(tmp_path: Path) -> None:
    runs, url = tmp_path / "runs", goodput_url(str(tmp_path / "yard"), "pretrain")
    submit(runs / "a", 40.0, 60.0, "node failure")
    submit(runs / "b", 100.0, 200.0)
    output = finish(tmp_path / "run")
    first = record_goodput(runs, output, url)
    assert first is not None
    assert (first.spent["queue"], first.spent["between"]) == (40_000, 20_000)
    assert (first.spent["start"], first.spent["step"]) == (30_000, 80_000)
    kept = store.read_json(url)
    assert kept["goodput"] == round(80 / 120, 5)
    assert kept["device_seconds"] == 400.0
    assert round(sum(kept["spent_percent"].values()), 3) == 100.0

    for file in (runs / "a").iterdir():
        file.unlink()
    again = record_goodput(runs, output, url)
    assert again is not None
    assert again.spent == first.spent
    assert store.read_json(url) == kept


def test_records_of_an_attempt_survive_a_change_of_the_code(tmp_path: Path) -> None:
    """A new version resumes from the saved steps and removes the work folder."""
    runs, url, run = tmp_path / "runs", str(tmp_path / "goodput.json"), tmp_path / "run"
    work = Path(Output.directory(str(run)).work_url, "0123")
    work.mkdir(parents=True)
    earlier = {**ATTEMPT, "began": 45.0, "loop_began": 46.0, "marks": [], "outcome": "failed"}
    (work / "attempt-0001.unit.json").write_text(json.dumps({**earlier, "ended": 58.0}))
    submit(runs / "a", 40.0, 60.0, "node failure")
    first = record_goodput(runs, Output.directory(str(run)), url)
    assert first is not None
    assert first.spent["lost"] == 12_000

    shutil.rmtree(work)
    submit(runs / "b", 100.0, 200.0)
    (run / "attempts.json").write_text(json.dumps([ATTEMPT]))
    second = record_goodput(runs, Output.directory(str(run)), url)
    assert second is not None
    assert (second.spent["lost"], second.spent["step"]) == (12_000, 80_000)


def test_a_reused_or_untrained_run_has_no_account(tmp_path: Path) -> None:
    runs, url = tmp_path / "runs", str(tmp_path / "goodput.json")
    submit(runs / "a", 40.0, 60.0, "wrong option")
    assert record_goodput(runs, Output.directory(str(tmp_path / "run")), url) is None
    assert not Path(url).exists()


def test_a_submission_that_found_nothing_to_do_is_left_out(tmp_path: Path) -> None:
    folder = submit(tmp_path / "a", 40.0, 60.0)
    (folder / "outcome.json").write_text('{"outcome": "noop"}')
    assert read_submissions(tmp_path) == []
    assert read_submissions(tmp_path / "nowhere") == []


def test_the_log_gives_the_last_sign_of_a_job_without_a_recorded_end(tmp_path: Path) -> None:
    folder = submit(tmp_path / "a", 40.0, None)
    (folder / "log.txt").write_text("iteration 1/ 2\n")
    os.utime(folder / "log.txt", (70.0, 70.0))
    (found,) = read_submissions(tmp_path)
    assert found.holds == ((40_000, 70_000),)


def test_an_earlier_run_of_the_job_does_not_count() -> None:
    kinds = ("node failure", "done", "time limit", "done")
    submissions = [
        Submission(attempt=str(i), waits=((i, i + 1),), kind=k) for i, k in enumerate(kinds)
    ]
    assert [submission.attempt for submission in last_run(submissions)] == ["2", "3"]
    assert last_run([]) == []


def test_the_page_says_goodput_kinds_and_attempts(tmp_path: Path) -> None:
    submit(tmp_path / "runs" / "a", 100.0, 200.0)
    output = finish(tmp_path / "run")
    found = record_goodput(tmp_path / "runs", output, str(tmp_path / "goodput.json"))
    assert found is not None
    text = markdown(found)
    assert "**Goodput 80.0 %**: of 0:01:40 of allocated time, 0:01:20 went" in text
    assert "| step | 0:01:20 | 66.7 % | 80.0 % |" in text
    assert "| `a` | 0:01:40 | 4 | 0 to 10 |  | done |" in text
    assert "| queue | 20.0 s | 16.7 % |  |" in text


def test_command_prints_the_account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit(tmp_path / "runs" / "a", 100.0, 200.0)
    finish(tmp_path / "run")
    runs, run = str(tmp_path / "runs"), str(tmp_path / "run")
    assert main([runs, run]) == 0
    assert "**Goodput 80.0 %**" in capsys.readouterr().out

    assert main([f"{runs}x", run]) == 2
    assert f"error: {runs}x: there is no such folder" in capsys.readouterr().err
    assert main([runs, f"{run}x"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, f"error: {run}x: no training has recorded" in captured.err) == ("", True)


# --- reading what blocks and trainings recorded ---------------------------------------------------


def event(name: str, time: float, **facts: str) -> Event:
    return Event(event=name, time=time, attempt="a", facts=dict(facts))


def test_events_are_waits_and_holds() -> None:
    events = [
        event("submitted", 1.0),
        event("queued", 1.5),
        event("started", 4.0),
        event("reattached", 5.0),
        event("queued", 6.0),
        event("started", 7.5),
        event("ended", 9.0, kind="done"),
    ]
    found = submission_of(events, last_sign=0.0)
    assert found is not None
    assert found.waits == ((1000, 4000), (6000, 7500))
    assert found.holds == ((4000, 6000), (7500, 9000))
    assert (found.attempt, found.kind) == ("a", "done")


def test_a_job_without_a_recorded_end_lasts_to_its_last_output() -> None:
    found = submission_of([event("submitted", 1.0), event("started", 1.0)], last_sign=5.0)
    assert found is not None
    assert (found.holds, found.kind) == (((1000, 5000),), "")
    silent = submission_of([event("started", 3.0)], last_sign=0.0)
    assert silent is not None
    assert silent.holds == ((3000, 3000),)


def test_clocks_that_disagree_make_no_negative_time() -> None:
    events = [event("submitted", 5.0), event("started", 3.0), event("ended", 4.0)]
    found = submission_of(events, last_sign=0.0)
    assert found is not None
    assert all(begin <= end for begin, end in (*found.waits, *found.holds))
    assert submission_of([], last_sign=0.0) is None


def test_an_attempt_is_read_as_training_wrote_it() -> None:
    written = {"step": 3, "time": 12.5, "compile": 0.25, "step_seconds": 1.0, "checkpoint": 0.5}
    found = attempt_of({"began": 10.0, "ranks": 2, "from_step": 0, "marks": [written]})
    assert found.marks[0].spent == {
        "compile": 250,
        "data_wait": 0,
        "checkpoint": 500,
        "evaluation": 0,
        "step": 1000,
    }
    assert (found.last_known, found.outcome, found.loop_began) == (12_500, "", None)


# --- real trainings, and what befalls them ------------------------------------------------------

TRAIN = """
import os, signal, sys, time
import trainyard.training.run.checkpointing as saving
from trainyard.training.loop.loop import TrainLoop

save, record = saving.write_step, TrainLoop._record

def slow(*given):
    time.sleep({slow})
    return save(*given)

def dying(self, *given):
    if self.state.step == {dies}:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
    return record(self, *given)

saving.write_step, TrainLoop._record = slow, dying
from stages.runtime.cli import stage_main
from stages.pretrain.config import PretrainConfig
sys.exit(stage_main("pretrain", PretrainConfig, "stages.pretrain.run", argv={argv!r}))
"""


def train(runs: Path, name: str, tokens: str, run: Path, dies: int, slow: float) -> None:
    argv = arguments(tokens, run, train_iters=12, save_interval=3, eval_interval=6)
    code = TRAIN.format(slow=slow, dies=dies, argv=argv)
    command = (sys.executable, "-c", code)
    spec = LaunchSpec(name="pretrain", command=command, run_directory=str(runs / name))

    async def whole() -> None:
        job = await ProcessJob(spec=spec).trigger()
        await job.wait_for_completion()
        status = (await job.fetch_result()).exit_status
        assert status == (3 if dies else 0), job.log_path.read_text()

    asyncio.run(whole())


@pytest.mark.slow
def test_kills_steps_done_twice_and_a_slow_save_are_all_accounted_for(tmp_path: Path) -> None:
    runs, run = tmp_path / "runs", tmp_path / "run"
    tokens = write_pair(tmp_path / "t", [60] * 40)
    train(runs, "a", tokens, run, dies=8, slow=0.0)
    train(runs, "b", tokens, run, dies=12, slow=0.0)
    shutil.rmtree(run / "iter_0000009")  # a store lost it: its steps are done a second time
    train(runs, "c", tokens, run, dies=0, slow=0.5)
    found = record_goodput(runs, Output.directory(str(run)), str(tmp_path / "goodput.json"))

    assert found is not None
    assert sum(found.spent.values()) == found.end - found.begin
    assert sum(found.spent[kind] for kind in KINDS if kind not in ("queue", "between")) == (
        found.allocated
    )
    first, second, third = found.rows
    assert [(row.from_step, row.last_step) for row in found.rows] == [(0, 6), (6, 9), (6, 12)]
    assert first.spent["step"] > 0
    assert first.spent["lost"] >= 20  # step 7, and the beginning of the one that it died in
    assert (second.spent["step"], second.spent["lost"] >= 100) == (0, True)  # steps 7 to 11
    assert (third.spent["lost"], third.ended) == (0, "done")
    assert third.spent["checkpoint"] >= 1000 > first.spent["checkpoint"]  # of steps 9 and 12
    assert third.spent["restore"] > 0
    assert min(row.spent["start"] for row in found.rows) > 0
    whole = store.read_json(str(tmp_path / "goodput.json"))
    assert round(sum(whole["spent_percent"].values()), 6) == 100.0
