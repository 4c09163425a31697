"""Which cases of parametrised tests run: few in the unit suite, a third in suites of minutes.

A test marked `few_cases(4)` has cases that differ in parameters alone: four of them are unit tests,
and the others are `slow`.

`pytest --third 2` keeps every test and, of one with several cases, every third case; the three
thirds together are all of them. Cases are taken in an order that mixes their parameters, the same
on every machine, so that each third sees every value of a parameter that has many cases.
`.ci/run` and two parts of `make test-full` choose the third by the commit. Tests marked
`every_case` do not rotate: their cases share what is expensive, or guard different code."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

THIRDS = 3
KEY = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--third`, which only suites of minutes are given."""
    parser.addoption(
        "--third",
        type=int,
        choices=range(THIRDS),
        help="of each parametrised test, run this third of the cases (0, 1 or 2)",
    )


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_few_cases(items: list[pytest.Item]) -> None:
    """Marks cases `slow`, before -m looks for the marker."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few_cases") is not None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("few_cases")
        assert marker is not None
        for item in _mixed(cases)[marker.args[0] :]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # after -m and -k, so that what they leave is what rotates
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the cases of the other two thirds."""
    third = config.getoption("--third")
    if third is None:
        return
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("every_case") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    left_out = {
        item for cases in tests.values() for item in set(cases).difference(_chosen(cases, third))
    }
    rotating = sum(len(cases) > 1 for cases in tests.values())
    config.stash[KEY] = (
        f"third {third} of 0 to {THIRDS - 1}: {len(items) - len(left_out)} tests and cases run,"
        f" {len(left_out)} cases of {rotating} parametrised tests are left to the other thirds"
    )
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _chosen(cases: list[pytest.Item], third: int) -> Iterable[pytest.Item]:
    """Every third of the cases, at least one."""
    step = min(THIRDS, len(cases))
    return _mixed(cases)[third % step :: step]


def _mixed(cases: list[pytest.Item]) -> list[pytest.Item]:
    """In an order that mixes their parameters."""
    return sorted(cases, key=lambda item: (zlib.crc32(item.nodeid.encode()), item.nodeid))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist hands its line to the process that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["third"] = session.config.stash.get(KEY, "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """All workers collect the same, so any line is the line."""
    line = getattr(node, "workeroutput", {}).get("third")
    if line:
        node.config.stash[KEY] = line  # type: ignore[attr-defined]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Which third it was, above pytest's last line."""
    if KEY in config.stash:
        terminalreporter.write_line(config.stash[KEY])
