"""A training on Slurm that is preempted or reaches its time limit is retried and resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.backends.run_folder import SUBMITTED
from flows.goodput.account import Account
from flows.goodput.report import account_of
from tests.yard.faults.faults import steps, training
from tests.yard.operator.deployed import comes
from tests.yard.slurm.cluster import ask, profile_on_two_nodes
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(1200)]

ITERATIONS = 1500
MANY = 6000
"""More than are made until Slurm looks at times again, which it does every half minute."""

LEFT_SECONDS = 35
"""When it looks it warns whoever it would be too late for the next time: so in this time the
warning comes, and the end of the time after it."""

STILL_SECONDS = 240
"""From a saved step to the next one, a restart of the training included."""


@dataclass(frozen=True)
class Went:
    """A training that came to its end, in one submission or several."""

    folders: list[Path]
    """Of these, in order."""
    spent: Account
    """Where the time of all of it went."""

    @property
    def log(self) -> str:
        """What all of them wrote."""
        return "".join((one / "log.txt").read_text() for one in self.folders)

    @property
    def kinds(self) -> list[str]:
        """How each ended."""
        return [json.loads((one / "settled.json").read_text())["kind"] for one in self.folders]


def moves_on(flow: subprocess.Popen[str], save: Path) -> bool:
    """Whether a flow soon saves a step more, or ends."""
    before = steps(save)
    return comes(STILL_SECONDS, lambda: steps(save) != before or flow.poll() is not None)


def goes_on(
    folder: Path,
    partition: str,
    disturb: Callable[[], object],
    iterations: int = ITERATIONS,
    options: str = "",
) -> Went:
    """Train, disturb it once the first step is saved, and see that it is all made once, each step
    after the one that was saved last.

    options: more of the profile's [slurm]."""
    environment = {"TRAINYARD_CACHE": str(folder / "cache")}
    yard = Yard(folder, {**environment, "SLURM_CONF": os.environ["SLURM_CONF"]})
    profile, save = folder / "site.toml", folder / "save"
    slurm = f'[slurm]\npartition = "{partition}"\nwarning_seconds = 10\n{options}'
    limit = "time_limit_seconds = 3600"
    profile.write_text(profile_on_two_nodes(folder, tables=slurm, resources=limit))
    document = training(folder, str(save), iterations, save_interval=100)
    arguments = ("pretrain", "--config", document, "--profile", str(profile))
    console = folder / "said.txt"
    with console.open("w") as stderr:
        flow = yard.start("-m", "flows.run_stage", *arguments, stderr=stderr)
        assert moves_on(flow, save), console.read_text()
        disturb()
        while flow.poll() is None:  # a busy machine may take its time, but not stand still
            assert moves_on(flow, save), console.read_text()
        flow.communicate()
    (attempts,) = folder.glob("runs/*/pretrain")
    went = Went(sorted(attempts.iterdir()), account_of(attempts, str(save)))
    assert flow.returncode == 0, console.read_text() + went.log
    assert "resuming from step " in went.log, went.log
    before, _, after = went.log.partition("resuming from step ")
    saved = max(map(int, re.findall(r"saved checkpoint step=(\d+)", before)))
    assert int(after.split()[0]) == saved
    made = [json.loads(line).get("step") for line in (save / "ledger.jsonl").open()]
    trained = [step for step in made if step]
    assert trained == sorted(set(trained))
    assert steps(save)[-1] == iterations
    assert sum(went.spent.spent.values()) == went.spent.end - went.spent.begin
    assert went.spent.rows[-1].last_step == iterations
    assert went.spent.spent["restore"] > 0
    assert 0 < (went.spent.goodput or 0) < 1
    return went


@pytest.mark.full
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("partition", "submissions"), [("spot", 2), ("debug", 1)], ids=["with grace", "requeued"]
)
def test_preempted_training_resumes(tmp_path: Path, partition: str, submissions: int) -> None:
    def others_come() -> None:
        others = ("--job-name=others", "--partition=urgent", "--nodelist=node2", "--exclusive")
        ask("sbatch", *others, "--output=/dev/null", "--wrap=sleep 5")

    went = goes_on(tmp_path, partition, others_come)
    assert len(went.folders) == submissions
    if submissions > 1:
        assert went.kinds == ["preempted", "done"]


@pytest.mark.full
@pytest.mark.usefixtures("cluster")
def test_a_training_at_its_time_limit_saves_and_resumes(tmp_path: Path) -> None:
    def time_is_soon_over() -> None:
        (folder,) = tmp_path.glob("runs/*/pretrain/*")
        ask("scontrol", "update", f"JobId={job_id(folder)}", f"EndTime=now+{LEFT_SECONDS}")

    went = goes_on(tmp_path, "debug", time_is_soon_over, MANY)
    assert went.kinds == ["time limit", "done"]
    assert [row.ended for row in went.spent.rows] == ["time limit", "done"]
    failure = json.loads((went.folders[0] / "failure.json").read_text())
    assert failure["exit_status"] == 128 + signal.SIGUSR1
    (saved,) = re.findall(r"saved step (\d+) \(asked to stop\)", went.log)
    assert f"resuming from step {saved}" in went.log
    # It left before its time was over: Slurm did not have to end it.
    assert "JobState=FAILED" in ask("scontrol", "show", "job", job_id(went.folders[0]))


def job_id(folder: Path) -> str:
    """Of the job that was submitted from a run folder."""
    return str(json.loads((folder / SUBMITTED).read_text())["job_id"])
