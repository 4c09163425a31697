"""What a person sees: headlines always, a stage's own lines in passing, Prefect's not at all."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from flows.logs import console
from flows.logs.console import JOB, Console, headline


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("prefect.task_runs.test")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.handlers.clear()


def test_headlines_line_up(log: logging.Logger) -> None:
    out = io.StringIO()
    log.addHandler(Console(out))
    headline(log, "merge", "runs")
    headline(log, "tokenize-train-00000", "done", 12.34, "0123456789ab", "there is no manifest yet")
    first, second = out.getvalue().splitlines()
    assert first.split()[1:] == ["merge", "runs"]
    assert second.split()[1:5] == ["tokenize-train-00000", "done", "12.3", "s"]
    assert first.index("runs") == second.index("done")
    assert second.endswith("0123456789ab  there is no manifest yet")


def test_the_console_shows_warnings_of_others_and_none_of_prefect(log: logging.Logger) -> None:
    out = io.StringIO()
    log.addHandler(Console(out))
    log.error("Finished in state Failed('...')")
    other = logging.LogRecord("s3fs", logging.WARNING, "", 0, "slow down", None, None)
    Console(out).handle(other)
    assert out.getvalue().split()[1:] == ["warning:", "slow", "down"]


def test_few_lines_without_terminal(log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    log.addHandler(Console(out))
    log.info("iteration 1", extra={JOB: "pretrain"})
    assert out.getvalue() == ""
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    log.info("iteration 2", extra={JOB: "pretrain"})
    assert out.getvalue().strip() == "pretrain: iteration 2"


def test_verbose_shows_every_line(log: logging.Logger) -> None:
    out = io.StringIO()
    log.addHandler(Console(out, verbose=True))
    for number in range(3):
        log.info("iteration %d", number, extra={JOB: "pretrain"})
    assert len(out.getvalue().splitlines()) == 3


def test_headlines_stay_on_terminal(log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    log.addHandler(Console(out))
    log.info("x" * 500, extra={JOB: "pretrain"})
    headline(log, "pretrain", "done", 1.0)
    passing, _, kept = out.getvalue().rpartition("\r\033[2K")
    assert "\n" not in passing
    assert len(passing) < 200
    assert kept.endswith("\n")
    assert "\033[32m" in kept


def test_what_passes_by_is_brief(log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    out = io.StringIO()
    log.addHandler(Console(out))
    for line in (" [2026-11-21 03:24:04] iteration       10/     200 | loss", "save: saved 10"):
        log.info("%s", line, extra={JOB: "pretrain"})
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert lines == ["pretrain: iteration 10/ 200 | loss", "pretrain: saved 10"]
