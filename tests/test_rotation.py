"""The thirds of `--third` are all cases together, and leave no test out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import rotation

pytest_plugins = ["pytester"]

SUITE = """
import pytest

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(4))
def test_of_twelve(a, b): pass

@pytest.mark.parametrize("a", "xy")
def test_of_two(a): pass

@pytest.mark.every_case
@pytest.mark.parametrize("a", range(5))
def test_of_five_that_all_run(a): pass

def test_alone(): pass
"""

FEW = """
import pytest

@pytest.mark.few_cases(2)
@pytest.mark.parametrize("a", range(5))
def test_of_five(a): pass

@pytest.mark.parametrize("a", "xyz")
def test_of_three(a): pass
"""


@pytest.mark.slow
def test_few_cases_are_unit_tests_and_the_others_slow(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FEW)
    pytester.makeconftest(Path(rotation.__file__).read_text())
    pytester.makeini("[pytest]\nmarkers =\n    every_case\n    few_cases\n    slow")
    fast = _collected(pytester, "-m", "not slow")
    slow = _collected(pytester, "-m", "slow")
    assert fast | slow == _collected(pytester)
    assert len(fast) == 2 + 3
    assert len(slow) == 3


@pytest.mark.slow
def test_the_thirds_are_all_cases_and_each_has_every_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    pytester.makeconftest(Path(rotation.__file__).read_text())
    pytester.makeini("[pytest]\nmarkers = every_case")
    thirds = [_collected(pytester, "--third", str(third)) for third in range(3)]
    assert set().union(*thirds) == _collected(pytester)
    for third in thirds:
        of = [name.partition("[")[0] for name in third]
        assert of.count("test_of_twelve") == 4
        assert of.count("test_of_two") == 1
        assert of.count("test_of_five_that_all_run") == 5
        assert of.count("test_alone") == 1


@pytest.mark.slow
def test_what_ran_is_printed_also_by_worker_processes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    pytester.makeconftest(Path(rotation.__file__).read_text())
    pytester.makeini("[pytest]\nmarkers = every_case")
    for options in ([], ["-n", "1"]):
        result = pytester.runpytest_inprocess("--third", "2", *options)
        result.stdout.fnmatch_lines(["third 2 of 0 to 2: 11 tests and cases run, 9 cases of 2 *"])


def _collected(pytester: pytest.Pytester, *options: str) -> set[str]:
    result = pytester.runpytest_inprocess("--collect-only", "-q", *options)
    return {line.partition("::")[2] for line in result.outlines if "::" in line}
