"""What came of the cases that stand behind the tables of docs/models.md.

    pytest --record ...    keep the outcomes of tests marked `recorded` in `tests/records.json`

A cell of a table says `yes` only if each of its cases has passed in a run that was recorded. A new
outcome replaces the last of that case; a case that is skipped has none."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest

from trainyard.artifacts.replace_file import replace_file

FILE = Path(__file__).with_name("records.json")
ROOT = FILE.parents[1]

Records = Mapping[str, Mapping[str, str]]
"""By test, then by case: `passed 2026-11-28 0123abcd`, with the commit of the tree that ran."""
Case = tuple[str, str]
"""A test, such as `tests/test_a.py::test_b`, and the id of a case of it."""


# --- recording ---------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--record`."""
    parser.addoption("--record", action="store_true", help=f"keep outcomes in {FILE.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Under xdist, the process that hears of all reports writes."""
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(FILE, f"{datetime.now(UTC):%Y-%m-%d} {commit()}"))


class Recorder:
    """Writes each outcome as it comes, so that a run which is stopped keeps what it has. Several
    runs may record side by side."""

    def __init__(self, file: Path, when: str) -> None:
        self._file, self._when = file, when

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A case has three reports; only that of the call may say that it passed."""
        is_outcome = report.failed or (report.when == "call" and report.passed)
        if "recorded" not in report.keywords or not is_outcome:
            return
        test, _, rest = report.nodeid.partition("[")
        with _alone(self._file.parent):
            records = {name: dict(cases) for name, cases in read(self._file).items()}
            records.setdefault(test, {})[rest.removesuffix("]")] = f"{report.outcome} {self._when}"
            text = json.dumps(records, indent=0, sort_keys=True, ensure_ascii=True)
            replace_file(self._file, f"{text}\n".encode())


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One at a time changes records here. The lock is the folder's: the file itself is replaced,
    and a file more would count as a change of the tree."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def commit() -> str:
    """Of the tree, with `-changed` if anything but the records differs from it."""
    name = _git("rev-parse", "--short=8", "HEAD").strip()
    changes = _git("status", "--porcelain", "--", ".", f":!{FILE.relative_to(ROOT)}")
    return f"{name}-changed" if changes.strip() else name


def _git(*words: str) -> str:
    return subprocess.check_output(("git", *words), text=True, cwd=ROOT)


# --- reading -----------------------------------------------------------------------------------


def read(file: Path = FILE) -> Records:
    """What was recorded."""
    found: Records = json.loads(file.read_text()) if file.exists() else {}
    return found


@cache
def recorded() -> Records:
    """What is in the repository."""
    return read()


def cell(cases: Iterable[Case], records: Records) -> str:
    """`yes` if all cases passed, `failed` if one did not; else how many ran; `-` without cases."""
    outcomes = [records.get(test, {}).get(case, "not run") for test, case in cases]
    passed = sum(outcome.startswith("passed ") for outcome in outcomes)
    if any(outcome.startswith("failed ") for outcome in outcomes):
        return "failed"
    if passed < len(outcomes):
        return f"{passed} of {len(outcomes)}" if passed else "not run"
    return "yes" if outcomes else "-"


def summary(cases: Iterable[Case], records: Records) -> str:
    """A sentence below a table: how many cases ran, and when."""
    wanted = set(cases)
    outcomes = [records[t][c] for t, c in wanted if c in records.get(t, {})]
    if not outcomes:
        return f"None of its {len(wanted)} cases was recorded."
    dates = sorted(re.findall(r" (\d{4}-\d\d-\d\d) ", " ".join(outcomes)))
    passed = sum(outcome.startswith("passed ") for outcome in outcomes)
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    passed_of = "All" if passed == len(wanted) else f"{passed} of its"
    return f"{passed_of} {len(wanted)} cases passed in recorded runs, {days}."
