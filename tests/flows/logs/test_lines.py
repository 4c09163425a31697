"""Lines of a job's log, which a second reader continues."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.logs.lines import LINE_END, Followed, Lines, parse_line

PARTS = st.sampled_from(["a", "line", "\n", "\r\n", "\u00e9", "x" * 9])


@settings(max_examples=40)
@given(st.lists(PARTS, max_size=20), st.data())
def test_however_bytes_are_cut_lines_are_the_same(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    rest, chunks = text.encode(), []
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        chunks.append(rest[:size])
        rest = rest[size:]
    lines = Lines()
    read = [line for chunk in chunks for line in lines.feed(chunk)] + list(lines.finish())
    assert read == [line for line in LINE_END.split(text) if line]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("12:00:00 warning loop: spike", (logging.WARNING, "loop: spike")),
        ("0: 12:00:00 error   loop: gone", (logging.ERROR, "0: loop: gone")),
        (" 12: 12:00:00 info    loop: on", (logging.INFO, " 12: loop: on")),
        ("127: NCCL WARN something", (logging.INFO, "127: NCCL WARN something")),
    ],
)
def test_levels_are_found_behind_the_label_of_a_node(line: str, expected: tuple[int, str]) -> None:
    assert parse_line(line) == expected


def test_a_second_reader_continues_where_the_first_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    first = Followed(tmp_path)
    assert list(first.read("log.txt")) == []
    log.write_text("one\ntwo\nhal")
    assert list(first.read("log.txt")) == ["one", "two"]
    first.remember()
    with log.open("a") as file:
        file.write("f\nthree\nrest")
    second = Followed(tmp_path)
    assert list(second.read("log.txt")) == ["half", "three"]
    assert list(second.finish("log.txt")) == ["rest"]
    assert list(first.read("log.txt")) == ["half", "three"]


def test_a_truncated_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("a long first line\n")
    followed = Followed(tmp_path)
    list(followed.read("log.txt"))
    log.write_text("new\n")
    assert list(followed.read("log.txt")) == ["new"]
