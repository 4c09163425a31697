"""What --help prints: texts in whole lines, a stage's description once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from stages.runtime.help_text import print_help


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """Turns toys
    into blocks.

    A second paragraph."""

    size: int | None = None
    """Side of a block, in
    (whole) millimetres."""
    bare: int = 0
    round: bool | None = None
    """Without corners."""


def test_help_joins_the_lines_of_a_text_and_describes_a_stage_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_help("toy", Toy, [], None)
    printed = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    assert "Side of a block, in (whole) millimetres. (default: None)" in printed
    assert printed.count("Turns toys into blocks.") == 1
    assert "--bare INT" in printed
    assert "--no-round, --round Without corners. (default: None)" in printed
    assert Toy.__annotations__["bare"] == "int", "an option without a text stays as it was"
