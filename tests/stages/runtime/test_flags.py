"""Flags of switches."""

from __future__ import annotations

import pytest

from stages.runtime.flags import read_flags
from trainyard.training.options.training import TrainingConfig


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--async-save", True),
        ("--no-async-save", False),
        ("--async-save --no-async-save", False),
        ("--no-async-save --async-save", True),
        ("--async-save None", None),
        ("--manual-gc", True),
        ("--no-manual-gc", False),
    ],
)
def test_a_switch_is_on_or_off_or_left_to_the_program(words: str, value: bool | None) -> None:
    assert set(read_flags(words.split(), TrainingConfig).values()) == {value}
