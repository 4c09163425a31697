"""Outcomes are kept case by case, and a table says `yes` only of what passed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.records import Recorder, Records, cell, read, summary

pytest_plugins = ["pytester"]

SUITE = """
import os
import pytest

@pytest.mark.recorded
@pytest.mark.parametrize("a", ["fine", "broken", "skipped", "torn [down]"])
def test_kept(a, request):
    if a == "broken" and "MENDED" not in os.environ:
        assert False
    if a == "skipped":
        pytest.skip()
    if a.startswith("torn"):
        request.addfinalizer(lambda: 1 / 0)

def test_left_out(): pass
"""
CONFTEST = """
from pathlib import Path
from tests.records import *
from tests.records import Recorder

def pytest_configure(config):
    config.pluginmanager.register(Recorder(Path("kept.json"), "2000-01-02 abc"))
"""


@pytest.mark.slow
def test_outcomes_are_kept_and_replaced(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_it=SUITE)
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers = recorded")
    pytester.runpytest_inprocess("-p", "no:cacheprovider")
    kept = read(pytester.path / "kept.json")
    when = "2000-01-02 abc"
    expected = {
        "broken": f"failed {when}",
        "fine": f"passed {when}",
        "torn [down]": f"failed {when}",
    }
    assert kept == {"test_it.py::test_kept": expected}
    monkeypatch.setenv("MENDED", "yes")
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "broken")
    kept = read(pytester.path / "kept.json")
    assert kept == {"test_it.py::test_kept": {**expected, "broken": f"passed {when}"}}


def test_runs_side_by_side_lose_no_outcome_and_the_file_is_always_whole(tmp_path: Path) -> None:
    file, where = tmp_path / "kept.json", ("t.py", 0, "t")

    def record(run: int) -> None:
        recorder = Recorder(file, "2000-01-02 abc")
        for case in range(20):
            name, words = f"t.py::t[{run}-{case}]", {"recorded": 1}
            report = pytest.TestReport(name, where, words, "passed", None, "call")
            recorder.pytest_runtest_logreport(report)
            read(file)

    with ThreadPoolExecutor() as pool:
        list(pool.map(record, range(3)))
    kept = {f"{run}-{case}": "passed 2000-01-02 abc" for run in range(3) for case in range(20)}
    assert read(file) == {"t.py::t": kept}
    assert list(tmp_path.iterdir()) == [file]


def test_a_cell_says_yes_only_if_every_case_passed() -> None:
    records: Records = {"t": {"a": "passed 2000-01-02 abc", "b": "failed 2000-01-03 abc"}}
    assert cell([], records) == "-"
    assert cell([("t", "a")], records) == "yes"
    assert cell([("t", "c"), ("u", "a")], records) == "not run"
    assert cell([("t", "a"), ("t", "c")], records) == "1 of 2"
    assert cell([("t", "a"), ("t", "b"), ("t", "c")], records) == "failed"
    assert summary([("t", "c")], records) == "None of its 1 cases was recorded."
    said = "1 of its 3 cases passed in recorded runs, 2000-01-02 to 2000-01-03."
    assert summary([("t", "a"), ("t", "b"), ("t", "c")], records) == said


def test_without_records_nothing_is_known(tmp_path: Path) -> None:
    assert read(tmp_path / "absent.json") == {}
