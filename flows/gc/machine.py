"""What runs leave on this machine: run folders of stages, scratch."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from flows.gc.policy import DAY, Garbage, Policy, age
from stages.scratch import abandoned, remove_if_abandoned

RUNS = ".runs"

ENDED = ("settled.json", "outcome.json", "failure.json")
"""Any of these in a run folder: its job has ended."""


def run_folders(place: Path) -> list[Path]:
    """The run folders below a place: .runs/JOB/ATTEMPT, of one recipe or of each."""
    homes = [place / RUNS, *place.glob(f"*/{RUNS}")]
    if place.name == RUNS:
        homes += [place, *(folder for folder in place.glob("*") if folder.is_dir())]
    return sorted({config.parent for home in homes for config in home.glob("*/*/config.toml")})


def unended(folders: Iterable[Path], policy: Policy) -> list[Path]:
    """The run folders of jobs that may run, or wait to."""
    now = time.time()
    return [
        folder
        for folder in folders
        if not _has_ended(folder) and now - written(folder) < policy.run_days * DAY
    ]


def old_runs(folders: Sequence[Path], policy: Policy) -> Iterator[Garbage]:
    """Run folders beyond those that are kept of each job, of long ago."""
    now = time.time()
    for job in sorted({folder.parent for folder in folders}):
        mine = sorted((f for f in folders if f.parent == job), key=written, reverse=True)
        for folder in mine[policy.keep_runs :]:
            seconds = now - written(folder)
            if seconds >= policy.run_days * DAY:
                yield Garbage(
                    kind="run folder",
                    url=str(folder),
                    size_bytes=size(folder),
                    why=f"{age(seconds)} old, not one of the newest {policy.keep_runs}",
                    remove=partial(shutil.rmtree, folder),
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


def _has_ended(folder: Path) -> bool:
    return any((folder / name).exists() for name in ENDED)
