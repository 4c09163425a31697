"""What files say ends up in messages, and must not tell a terminal what to do."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from stages.runtime.failure import report_failure
from tests.stages.directly import run_program
from trainyard.errors import ArtifactError
from trainyard.logging import configure, one_line, printable

HOSTILE = "a\x1b]0;owned\x07\x9b2Jb\r\x00\u202ec"
WRITTEN_OUT = r"a\x1b]0;owned\x07\x9b2Jb\r\x00\u202ec"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    ours, root = [logging.getLogger(n) for n in ("trainyard", "stages")], logging.getLogger()
    before = root.handlers[:], root.level, [(log, log.level) for log in ours]
    made = io.StringIO()
    configure(stream=made)
    yield made
    root.handlers[:], root.level = before[0], before[1]
    for log, level in before[2]:
        log.setLevel(level)


def test_control_characters_are_escaped() -> None:
    assert printable(HOSTILE) == one_line(HOSTILE) == WRITTEN_OUT
    assert printable("half \udc80 a letter") == r"half \udc80 a letter"
    assert printable("first\n\tsecond") == "first\n\tsecond"
    assert one_line("12:00\ninfo") == r"12:00\ninfo"
    for text in ("plain", "", "gr\u00f6\u00dfe \u5927 \u20ac", "back\\slash"):
        assert printable(text) == one_line(text) == text


def test_control_characters_in_messages_and_tracebacks_are_escaped(stream: io.StringIO) -> None:
    log = logging.getLogger("stages.toy")
    log.warning("tensor %s\nis unknown", HOSTILE)
    try:
        raise ArtifactError(HOSTILE)
    except ArtifactError:
        log.exception("while %s", "reading")
    text = stream.getvalue()
    assert text.count(WRITTEN_OUT) == 2
    assert f"toy: tensor {WRITTEN_OUT}\nis unknown\n" in text
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize("error", [ArtifactError(HOSTILE), RuntimeError(HOSTILE)])
def test_control_characters_in_failures_are_escaped(
    stream: io.StringIO, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    report_failure("toy", error, debug=True)
    output = capsys.readouterr().err + stream.getvalue()
    assert output.count(WRITTEN_OUT) == 2
    assert output.replace("\n", "").isprintable()


def test_a_colour_is_the_only_escape_on_a_terminal(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(stream, "isatty", lambda: True)
    configure(stream=stream)
    logging.getLogger("stages.toy").error("no %s", "\x1b[2J")
    assert stream.getvalue().count("\x1b") == 2
    assert r"no \x1b[2J" in stream.getvalue()


def test_control_characters_in_options_are_escaped() -> None:
    done = run_program("stages.inspect", "/nowhere/\x1b[2J")
    assert done.status == 1
    assert r"/nowhere/\x1b[2J: no checkpoint there" in done.err
