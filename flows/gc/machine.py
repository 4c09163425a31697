"""What runs leave on this machine: run folders of stages, scratch."""

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
"""Either of these in a run folder: its job has ended, and is not run again."""
FAILED = "failure.json"
"""So has one that left this, unless a scheduler runs it again."""

OURS = re.compile(rf"\d{{8}}-\d{{6}}-[0-9a-f]{{6}}|([0-9a-f]{{{DIGITS}}})-\d+")
"""Names of run folders: by the time, or, of a scheduler's job, by whose submission it is and the
how manieth."""

UNENDED_DAYS = 7.0
"""A job without an end may say nothing for so long, in a queue for instance, whatever the policy
says."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder, looked at once."""

    folder: Path
    seconds: float
    """Since anything in it was written."""
    has_ended: bool

    @property
    def series(self) -> str:
        """The submissions of one job by one flow run, which counts them by their folders."""
        named = OURS.fullmatch(self.folder.name)
        return (named and named[1]) or self.folder.name

    def may_go_on(self, policy: Policy) -> bool:
        """True when its job may run, or wait to."""
        return not self.has_ended and self.seconds < max(policy.run_days, UNENDED_DAYS) * DAY


def run_homes(yard: Path, own: Path | None) -> list[Path]:
    """The folders that hold JOB/ATTEMPT/, of one recipe or of each: below a yard, and in the run
    folder that a profile names."""
    homes = [yard / RUNS, *yard.glob(f"*/{RUNS}"), *(() if own is None else own.glob("*"))]
    return [home for home in homes if home.is_dir()]


def runs(homes: Iterable[Path]) -> list[Run]:
    """Every run folder in these, by name."""
    folders = {config.parent for home in homes for config in home.glob("*/*/config.toml")}
    ours, now = sorted(one for one in folders if OURS.fullmatch(one.name)), time.time()
    return [Run(one, now - written(one), has_ended(one)) for one in ours]


def old_runs(found: Iterable[Run], policy: Policy) -> Iterator[Garbage]:
    """Run folders beyond those that are kept of each job, of long ago.

    A folder that stays keeps all of its series: by the others its flow run knows that it is not
    the first."""
    jobs: dict[Path, list[Run]] = defaultdict(list)
    for run in found:
        jobs[run.folder.parent].append(run)
    for mine in jobs.values():
        mine.sort(key=lambda run: run.seconds)
        stay = {run.series for run in mine[: policy.keep_runs]}
        stay |= {run.series for run in mine if run.seconds < policy.run_days * DAY}
        stay |= {run.series for run in mine if run.may_go_on(policy)}
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
    """Scratch folders whose runs were killed."""
    for folder in abandoned(root or Path(tempfile.gettempdir())):
        yield Garbage(
            kind="scratch",
            url=str(folder),
            size_bytes=size(folder),
            why="its run is gone",
            remove=partial(remove_if_abandoned, folder),
        )


def written(folder: Path) -> float:
    """When anything in a folder was last written."""
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
    """True when the job of a run folder is over: neither runs nor waits to."""
    if any((folder / name).exists() for name in ENDED):
        return True
    states = [event.event for event in read_events(folder) if event.event != "reattached"]
    if states:
        return states[-1] == "ended"
    return (folder / FAILED).exists()
