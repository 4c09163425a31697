"""What a person sees while something long runs."""

from __future__ import annotations

import io
import logging

import pytest

from trainyard.logging import Formatter, configure
from trainyard.progress import Progress


def test_the_line_has_share_rate_and_time_left() -> None:
    progress = Progress(4000, "documents", "tokenize")
    progress.update(1000)
    line = progress.line(progress._began + 2.5)
    assert line == "tokenize: 1,000 of 4,000 documents (25 %), 400 documents/s, 8 s left"


def test_the_rate_of_a_resumed_count_ignores_earlier_work() -> None:
    progress = Progress(100, "steps", "pretrain", start=90)
    progress.update(5)
    assert "95 of 100 steps (95 %), 0.50 steps/s, 10 s left" in progress.line(progress._began + 10)


def test_without_a_terminal_progress_is_occasional_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with Progress(3, "units", "work", line_seconds=0.0) as progress:
        progress.update(1)
        progress.update(1)
    assert [r.getMessage().split(",")[0] for r in caplog.records] == [
        "work: 1 of 3 units (33 %)",
        "work: 2 of 3 units (67 %)",
    ]


def test_every_line_names_its_rank_if_there_are_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = logging.LogRecord("trainyard.a.loop", logging.INFO, "", 0, "loss=%s", (1,), None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert Formatter(colour=False).format(record).endswith("info    rank 1  loop: loss=1")
    monkeypatch.delenv("WORLD_SIZE")
    assert Formatter(colour=False).format(record).endswith("info    loop: loss=1")


def test_other_libraries_log_only_warnings() -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:]
    try:
        configure("info", stream)
        logging.getLogger("botocore").info("chatter")
        logging.getLogger("trainyard.x").info("ours")
        logging.getLogger("trainyard.x").debug("detail")
    finally:
        root.handlers[:] = before
    assert "ours" in stream.getvalue()
    assert "chatter" not in stream.getvalue()
    assert "detail" not in stream.getvalue()
    assert "\033" not in stream.getvalue()
