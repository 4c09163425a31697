"""Runs the parts of `make test-full`, and records which have passed on this commit.

    python -m tests.full                   all parts that have not passed on this commit
    python -m tests.full yard layouts      these parts, again if they have passed

Each part is recorded when it ends, in `.test-full/COMMIT.json`, so a release can be certified part
by part. In a tree with changes nothing that passed counts the next time, and a part during which
the tree changes is not recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.rotation import THIRDS

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / ".test-full"
PYTEST = (sys.executable, "-m", "pytest", "-q")
SUMMARY = re.compile(r"=* *(\d+ (?:passed|failed|skipped|error).*) in [\d.]+s.*")

LAYOUTS = "tests/trainyard/training/layouts"
"""Up to eight processes each, so one at a time."""
CLUSTERED = (
    "tests/yard/slurm",
    "tests/yard/test_everywhere.py",
    "tests/yard/operator/test_scheduled.py",
)
"""They need the one Slurm cluster that a machine can have."""
YARD = ("deploy/dev/with-yard.sh", sys.executable, "-m", "tests.full", "--inside", "yard")


@dataclass(frozen=True, slots=True)
class Part:
    """Some suites, and what starts around them."""

    minutes: int
    """On two idle cores."""
    commands: tuple[tuple[str, ...], ...]
    around: tuple[str, ...] = ()
    """A command that runs `commands` with `--inside`."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a part ended."""

    passed: bool
    date: str
    seconds: int
    summaries: tuple[str, ...]
    """The last lines of pytest."""
    third: int
    """Which third of the cases that rotate."""


def parts(jobs: int, third: int) -> dict[str, Part]:
    """All parts. third: of the cases of tests that take minutes, in `layouts` and `yard`."""
    beside, rotating = ("-n", str(jobs)), ("--third", str(third))
    outside = f"--ignore={LAYOUTS}"
    no_cluster = tuple(f"--ignore={path}" for path in CLUSTERED)
    small = "(slow or kill) and not yard and not full"
    yard = (*PYTEST, *rotating, "-m", "yard")
    return {
        "slow": Part(25, ((*PYTEST, *beside, "-m", small, outside),)),
        "large": Part(20, ((*PYTEST, *beside, "-m", "full and not yard", outside),)),
        "layouts": Part(
            17,
            (
                (*PYTEST, "-m", "not full", LAYOUTS),
                (*PYTEST, *rotating, "-m", "full", LAYOUTS),
            ),
        ),
        "yard": Part(
            75,
            (
                (*yard, *beside, "--dist", "loadfile", *no_cluster, "tests/yard"),
                (*yard, *CLUSTERED),
            ),
            YARD,
        ),
        "fuzz": Part(6, ((*PYTEST, *beside, "-m", "fuzz", "tests/fuzz"),)),
    }


FUZZING = {"TRAINYARD_FUZZ_SECONDS": "120", "TRAINYARD_FUZZ_SEED": "0"}
"""A new seed every time."""


def main(words: Sequence[str]) -> int:
    """Run parts; returns 0 if all parts that were asked for have passed on this commit."""
    os.chdir(ROOT)
    commit = current_commit()
    third = int(os.environ.get("THIRD") or int(commit[:7], 16) % THIRDS)
    known = parts(int(os.environ.get("JOBS") or 2), third)
    is_inside = list(words[:1]) == ["--inside"]
    wanted = list(words[1:] if is_inside else words)
    if unknown := [name for name in wanted if name not in known]:
        print(f"error: there is no part {unknown[0]!r}; parts: {', '.join(known)}", file=sys.stderr)
        return 2
    if is_inside:
        statuses = [subprocess.call(one) for name in wanted for one in known[name].commands]
        return int(any(statuses))
    records = Records(RECORDS / f"{commit}.json")
    for name in wanted or [name for name in known if not records.has_passed(name)]:
        print(f"=== {name}, about {known[name].minutes} minutes", flush=True)
        ended = run(known[name], third)
        if current_commit() != commit:
            print(f"error: the tree changed while {name} ran; run it again", file=sys.stderr)
            return 2
        records.add(name, ended)
    print(f"=== {commit}")
    print(records.table(known))
    return int(not all(map(records.has_passed, wanted or known)))


def current_commit() -> str:
    """The commit of the tree, with `-changed` if the tree has changes."""
    commit = subprocess.check_output(("git", "rev-parse", "HEAD"), text=True).strip()
    changes = subprocess.check_output(("git", "status", "--porcelain"), text=True)
    return f"{commit}-changed" if changes.strip() else commit


def run(part: Part, third: int) -> Ended:
    """Run all commands of a part, also after one that failed."""
    began, summaries, failed = time.time(), list[str](), False
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **FUZZING}
    for command in (part.around,) if part.around else part.commands:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if found := SUMMARY.fullmatch(line.strip()):
                    summaries.append(found[1])
        failed |= process.returncode != 0
    failed |= len(summaries) < len(part.commands)
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(began))
    return Ended(not failed, date, round(time.time() - began), tuple(summaries), third)


class Records:
    """How the parts ended on one commit, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = json.loads(path.read_text()) if path.exists() else {}
        self._ended = {name: Ended(**fields) for name, fields in found.items()}
        self._counts = not path.stem.endswith("-changed")
        self._of_now: set[str] = set()

    def has_passed(self, name: str) -> bool:
        """Whether a part has passed on this commit, or in this call."""
        ended = self._ended.get(name)
        return ended is not None and ended.passed and (self._counts or name in self._of_now)

    def add(self, name: str, ended: Ended) -> None:
        """Record the end of a part."""
        self._ended[name] = ended
        self._of_now.add(name)
        self._path.parent.mkdir(exist_ok=True)
        document = {name: asdict(ended) for name, ended in self._ended.items()}
        self._path.write_text(json.dumps(document, indent=1) + "\n")

    def table(self, known: Mapping[str, Part]) -> str:
        """A line for each part."""
        return "\n".join(f"{name:10}{self._line(name)}" for name in known)

    def _line(self, name: str) -> str:
        ended = self._ended.get(name)
        if ended is None:
            return "not run"
        state = "passed" if ended.passed else "FAILED"
        when = f"{ended.date}  {ended.seconds:5d} s  third {ended.third}"
        return f"{state}  {when}  {'; '.join(ended.summaries)}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
