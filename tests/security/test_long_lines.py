"""A job, or a document, that writes one endless line stops no flow."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from flows.backends.kubernetes import client as kubernetes
from flows.backends.outcome import JobEnd, classify_exit, read_failure
from flows.logs.lines import MOST_BYTES, Followed, Lines
from flows.pages.progress import share_done
from stages.runtime.failure import RUN_DIR, report_failure
from trainyard.errors import ConfigError
from trainyard.logging import MOST_CHARS, Formatter, shortened

CHUNK = 2**16
SECONDS = 2.0
"""Far more than linear time takes for SIZE; the square took minutes."""
SIZE = 16 * 2**20

ENDLESS = {
    "one letter": b"x",
    "half characters": b"\xc3",
    "whole characters": "\u00e9".encode(),
    "spaces": b" ",
    "zeros": b"\0",
    "empty lines": b"\n",
    "carriage returns": b"\r",
    "escapes": b"\x1b[2K",
}


def seconds_of(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def chunks(unit: bytes, size: int) -> list[bytes]:
    return [(unit * (CHUNK // len(unit) + 1))[:CHUNK]] * (size // CHUNK)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_long_line_takes_time_in_its_length_and_is_cut(name: str) -> None:
    lines, found = Lines(), []

    def read() -> None:
        for chunk in chunks(ENDLESS[name], SIZE):
            found.extend(lines.feed(chunk))
        found.extend(lines.finish())

    assert seconds_of(read) < SECONDS
    assert all(len(line) <= MOST_BYTES + 40 for line in found)
    assert len(found) == (0 if ENDLESS[name] in (b"\n", b"\r") else 1)
    for line in found:
        assert line.endswith(f" [{SIZE - MOST_BYTES} bytes left out]")


@pytest.mark.parametrize("size", [MOST_BYTES - 1, MOST_BYTES, MOST_BYTES + 1])
@pytest.mark.parametrize("step", [1000, MOST_BYTES, 10 * MOST_BYTES])
def test_lines_about_the_bound_are_whole_or_say_what_is_missing(size: int, step: int) -> None:
    data = b"before\n" + b"x" * size + b"\nafter\n"
    lines = Lines()
    found = [line for at in range(0, len(data), step) for line in lines.feed(data[at : at + step])]
    middle = "x" * size if size <= MOST_BYTES else "x" * MOST_BYTES + " [1 bytes left out]"
    assert found == ["before", middle, "after"]


def test_a_character_at_the_cut_is_left_out_whole() -> None:
    lines = Lines()
    (line,) = lines.feed(b"x" * (MOST_BYTES - 1) + "\u00e9\n".encode())
    assert line == "x" * (MOST_BYTES - 1) + " [1 bytes left out]"


def test_a_second_reader_reads_a_long_line_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"one\n" + b"x" * (3 * MOST_BYTES))
    first = Followed(tmp_path)
    assert list(first.read("log")) == ["one"]
    first.remember()
    with (tmp_path / "log").open("ab") as log:
        log.write(b"\ntwo\n")
    long = "x" * MOST_BYTES + f" [{2 * MOST_BYTES} bytes left out]"
    assert list(Followed(tmp_path).read("log")) == [long, "two"]


def test_a_long_line_of_a_pod_takes_time_in_its_length() -> None:
    class Response:
        """The body of an answer."""

        @property
        def content(self) -> Response:
            return self

        async def iter_any(self) -> AsyncIterator[bytes]:
            for chunk in [*chunks(b"x", SIZE), b"\nend"]:
                yield chunk

    async def read() -> list[bytes]:
        return [line async for batch in kubernetes._lines(Response()) for line in batch]

    found: list[bytes] = []
    assert seconds_of(lambda: found.extend(asyncio.run(read()))) < SECONDS
    assert [len(line) for line in found] == [SIZE, 3]


@pytest.mark.parametrize("unit", [": 1 of 1 x", ": 1 of 1 x (1 ", "iteration 1", "iteration  "])
def test_lines_that_look_like_progress_take_no_time(unit: str) -> None:
    line = (unit * MOST_BYTES)[:MOST_BYTES]
    assert seconds_of(lambda: share_done(line)) < 0.1


# --- messages that quote a foreign name -------------------------------------------------------

NAME = "n" * (4 * MOST_CHARS)


def test_a_long_name_in_a_message_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    report_failure("merge", ConfigError(f"no option {NAME}"), debug=False)
    failure = read_failure(str(tmp_path))
    assert failure is not None
    assert failure["message"] == shortened(f"no option {NAME}")
    assert len(failure["message"]) < MOST_CHARS + 40
    record = logging.LogRecord("stages.merge", logging.ERROR, "", 0, NAME, (), None)
    assert len(Formatter(colour=False).format(record)) < MOST_CHARS + 100


def test_a_report_that_another_program_wrote_is_cut_as_well(tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text(json.dumps({"message": NAME, "exit_status": 2}))
    outcome = classify_exit("merge", JobEnd(failure=read_failure(str(tmp_path)), exit_code=2))
    assert len(outcome.message) < MOST_CHARS + 40
