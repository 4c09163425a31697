"""Finds what runs leave on this machine: run folders and scratch folders."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flows.backends.events import read_events
from flows.backends.run_folder import DIGITS
from flows.gc.policy import DAY, Garbage, Policy, age
from stages.runtime.scratch import abandoned, remove_if_abandoned

RUNS = ".runs"

ENDED = ("settled.json", "outcome.json")
"""Files of a run folder whose job ended and does not run again."""
FAILED = "failure.json"
"""File of a run folder whose job ended, unless a scheduler runs it again."""

OURS = re.compile(rf"\d{{8}}-\d{{6}}-[0-9a-f]{{6}}|([0-9a-f]{{{DIGITS}}})-\d+")
"""Names of run folders: the time, or for a scheduler's job its flow run and submission number."""

UNENDED_DAYS = 7.0
"""How long a job without a recorded end may be silent, such as in a queue, also if the policy is
shorter."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run folder."""

    folder: Path
    seconds: float
    """Since the last write to a file in it."""
    has_ended: bool

    @property
    def series(self) -> str:
        """Identifies the submissions of one job by one flow run, which numbers their folders."""
        named = OURS.fullmatch(self.folder.name)
        return (named and named[1]) or self.folder.name

    def may_run(self, policy: Policy) -> bool:
        """Whether its job may run, or wait to run."""
        return not self.has_ended and self.seconds < max(policy.run_days, UNENDED_DAYS) * DAY


def run_homes(yard: Path, own: Path | None) -> list[Path]:
    """The folders with JOB/ATTEMPT/: of a yard or each of its recipes, and the profile's
    run_folder."""
    homes = [yard / RUNS, *yard.glob(f"*/{RUNS}"), *(() if own is None else own.glob("*"))]
    return [home for home in homes if home.is_dir()]


def runs(homes: Iterable[Path]) -> list[RunFolder]:
    """Every run folder in these folders, by name."""
    folders = {config.parent for home in homes for config in home.glob("*/*/config.toml")}
    ours, now = sorted(one for one in folders if OURS.fullmatch(one.name)), time.time()
    return [RunFolder(one, now - written(one), has_ended(one)) for one in ours]


def old_runs(found: Iterable[RunFolder], policy: Policy) -> Iterator[Garbage]:
    """Old run folders beyond the newest ones of each job.

    A folder that stays keeps all folders of its series: the flow run counts submissions by them."""
    jobs: dict[Path, list[RunFolder]] = defaultdict(list)
    for run in found:
        jobs[run.folder.parent].append(run)
    for mine in jobs.values():
        mine.sort(key=lambda run: run.seconds)
        stay = {run.series for run in mine[: policy.keep_runs]}
        stay |= {run.series for run in mine if run.seconds < policy.run_days * DAY}
        stay |= {run.series for run in mine if run.may_run(policy)}
        for run in mine:
            if run.series not in stay:
                yield Garbage(
                    kind="run folder",
                    url=str(run.folder),
                    size_bytes=size(run.folder),
                    why=f"{age(run.seconds)} old, not one of the newest {policy.keep_runs}",
                    remove=partial(shutil.rmtree, run.folder),
                )


def old_scratch(root: Path | None = None) -> Iterator[Garbage]:
    """Scratch folders of killed runs."""
    for folder in abandoned(root or Path(tempfile.gettempdir())):
        yield Garbage(
            kind="scratch",
            url=str(folder),
            size_bytes=size(folder),
            why="its run was killed",
            remove=partial(remove_if_abandoned, folder),
        )


def written(folder: Path) -> float:
    """When a file in a folder was last written."""
    times = [folder.stat().st_mtime]
    for path in folder.rglob("*"):
        try:
            times.append(path.lstat().st_mtime)
        except FileNotFoundError:
            continue
    return max(times)


def size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def has_ended(folder: Path) -> bool:
    """Whether the job of a run folder has ended: it neither runs nor waits to run."""
    if any((folder / name).exists() for name in ENDED):
        return True
    states = [event.event for event in read_events(folder) if event.event != "reattached"]
    if states:
        return states[-1] == "ended"
    return (folder / FAILED).exists()
