"""Run folders: which of them go, and that none goes whose job may run."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.backends.events import Name, record_event
from flows.backends.run_folder import job_key
from flows.gc import command
from flows.gc.command import homes_of, main
from flows.gc.machine import has_ended, old_runs, run_homes, runs
from flows.gc.policy import DAY, Policy
from flows.gc.sweep import Plan, Swept
from flows.recipes.stage_job import stage_job
from flows.runner.stage_task import _prepare, next_key
from flows.yard.profile import StageEnvironment
from flows.yard.read_profile import parse_profile
from tests.flows.gc.yards import make_older

KEY = "0123456789abcdef"
NOTHING_KEPT = Policy(keep_runs=0, run_days=0)


def begin(home: Path, name: str) -> Path:
    """The run folder JOB/ATTEMPT of a job that has begun."""
    folder = home / name
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("a = 1\n")
    return folder


def end(folder: Path, name: str = "settled.json") -> None:
    (folder / name).write_text("{}")


def remove(yard: Path, policy: Policy) -> int:
    """Remove old run folders below a yard; how many."""
    garbage = list(old_runs(runs(run_homes(yard, None)), policy))
    for one in garbage:
        one.remove()
    return len(garbage)


def left(job: Path) -> list[str]:
    return sorted(folder.name for folder in job.iterdir())


def test_old_run_folders_go_but_for_the_newest_and_those_still_young(tmp_path: Path) -> None:
    job = tmp_path / "gpt" / ".runs" / "pretrain"
    names = [f"2026010{number}-000000-abcdef" for number in range(5)]
    for number, name in enumerate(names):
        folder = begin(job, name)
        end(folder)
        make_older(folder, (100 - 20 * number) * DAY)
    assert remove(tmp_path, Policy(keep_runs=1, run_days=50)) == 3
    assert left(job) == names[3:]


def test_the_run_folder_of_a_job_that_may_run_stays_whatever_the_policy(tmp_path: Path) -> None:
    job = tmp_path / ".runs" / "pretrain"
    names = [f"{KEY[:-1]}{number}-1" for number in range(3)]
    for name in names:
        make_older(begin(job, name), 2 * DAY)  # in a queue: nobody writes there
    assert remove(tmp_path, NOTHING_KEPT) == 0
    end(job / names[0])
    make_older(job / names[1], 8 * DAY)  # killed, and nobody could say so
    assert remove(tmp_path, NOTHING_KEPT) == 2
    assert left(job) == names[2:]


@pytest.mark.parametrize(
    ("files", "events", "over"),
    [
        ((), (), False),
        (("settled.json",), ("submitted", "started"), True),
        (("outcome.json",), ("submitted", "started"), True),  # its flow is gone
        (("failure.json",), ("submitted", "started", "ended"), True),
        (("failure.json",), ("submitted", "started", "queued"), False),  # a scheduler has it again
        (("failure.json",), (), True),
        ((), ("submitted", "started", "ended"), True),  # by SIGKILL, without a word
        ((), ("submitted", "started", "reattached"), False),
    ],
)
def test_files_that_show_that_a_job_has_ended(
    tmp_path: Path, files: tuple[str, ...], events: tuple[Name, ...], over: bool
) -> None:
    folder = begin(tmp_path / ".runs", f"pretrain/{KEY}-1")
    for name in files:
        end(folder, name)
    for event in events:
        record_event(folder, event)
    assert has_ended(folder) is over
    assert remove(tmp_path, NOTHING_KEPT) == int(over)


def test_by_its_older_folders_a_flow_run_knows_how_often_it_has_submitted(tmp_path: Path) -> None:
    job = tmp_path / ".runs" / "pretrain"
    for submission in range(1, 13):
        folder = begin(job, job_key("run", str(job), submission))
        if submission < 12:
            end(folder)
            make_older(folder, (60 - submission) * DAY)
    before = next_key(job, "run")
    assert remove(tmp_path, Policy(keep_runs=1)) == 0
    assert next_key(job, "run") == before
    end(job / before)
    make_older(job / before, 31 * DAY)
    assert remove(tmp_path, Policy(keep_runs=0)) == 12
    assert left(job) == []


def test_run_folders_are_found_where_a_profile_says_whatever_that_is_called(tmp_path: Path) -> None:
    profile = parse_profile({"run_folder": str(tmp_path / "attempts")}, "mine")
    for yard in ("s3://bucket/yard", str(tmp_path / "yard")):
        home = Path(profile.stage_environment(f"{yard}/tiny").run_folder)
        folder = begin(home, f"plan/{KEY}-{len(yard)}")
        assert folder in [run.folder for run in runs(homes_of(profile, yard))]
    by_default = parse_profile({}, "mine").stage_environment("s3://bucket/yard/tiny").run_folder
    assert Path(by_default) == Path("yard/tiny/.runs").absolute()


@pytest.mark.parametrize("block", ["process", "slurm"])
def test_only_folders_that_a_flow_has_named_are_run_folders(tmp_path: Path, block: str) -> None:
    own = tmp_path / "shared"
    site = StageEnvironment(run_folder=str(own / "tiny"), backend=block)
    spec = _prepare(stage_job("verify", {"url": ["x"]}, "test"), site)
    begin(own, "tiny/notes/mine")
    assert [str(run.folder) for run in runs(run_homes(tmp_path, own))] == [spec.run_directory]


# --- a root that is not there -------------------------------------------------------------------


def test_a_named_root_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typo = str(tmp_path / "yrad")
    assert main(["--root", typo]) == 2
    assert f"{typo}: there is no such folder" in capsys.readouterr().err
    (tmp_path / "yard").mkdir()
    assert main(["--root", str(tmp_path / "yard"), "--dry-run"]) == 0


def test_a_sweep_removes_nothing_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def sweep(root: str, homes: object, policy: Policy, remove: bool, *more: object) -> Swept:
        asked.append(remove)
        return Swept(Plan(root, (), {}), ())

    monkeypatch.setattr(command, "sweep", sweep)
    for flags in ([], ["--dry-run"], ["--remove"]):
        assert main(["--root", str(tmp_path), *flags]) == 0
    assert asked == [False, False, True]
    with pytest.raises(SystemExit):
        main(["--root", str(tmp_path), "--remove", "--dry-run"])
