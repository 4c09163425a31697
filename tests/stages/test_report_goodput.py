"""The part of the run card about where time went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.goodput.account import KINDS as COUNTED
from stages.report.facts import Card, Lineage
from stages.report.formats import NARROW
from stages.report.goodput import KINDS, goodput, read_goodput
from stages.report.page import render
from trainyard.errors import ArtifactError

LINEAGE = Lineage(artifacts=(), edges=(), destination="")
DOCUMENT = {
    "goodput": 0.75,
    "allocated_seconds": 400.0,
    "spent_seconds": {"queue": 100.0, "step": 300.0, "lost": 100.0, "idle": 0.0},
    "spent_percent": {"queue": 20.0, "step": 60.0, "lost": 20.0, "idle": 0.0},
    "attempts": [
        {
            **{"attempt": "a-<1>", "begin": 100.0, "end": 300.0, "ranks": 8, "from_step": 0},
            **{"last_step": 50, "spent": {"lost": 100.0}, "ended": "node failure"},
        },
        {"attempt": "b", "begin": 300.0, "end": 500.0, "ranks": None, "from_step": None},
    ],
}


def card(document: object) -> Card:
    return Card(title="run", lineage=LINEAGE, goodput=document)  # type: ignore[arg-type]


def test_all_that_is_counted_has_words() -> None:
    assert [name for name, _, _ in KINDS] == list(COUNTED)


def test_shares_and_attempts_are_shown() -> None:
    page = render(card(DOCUMENT)).replace(NARROW, " ")
    section = page[page.index("How much of it was training") :]
    for words in (
        *("Goodput 75.0 %", "of the 6 min 40 s in which 2 attempts held", "60.0%", "20.0%"),
        *("steps that were lost", "a-&lt;1&gt;", "0 to 50", "node failure", "3 min 20 s"),
    ):
        assert words in section, words
    assert "doing nothing" not in section  # what took no time is left out


def test_a_card_without_an_account_has_no_such_section() -> None:
    assert goodput(card(None)) == ""
    assert goodput(card({"spent_seconds": {"step": 0.0}})) == ""
    assert "Over one attempt" in goodput(
        card(
            {
                "spent_seconds": {"step": 1.0},
                "attempts": [{"attempt": "a", "begin": 0.0, "end": 1.0}],
            }
        )
    )


def test_the_document_is_read_where_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "pretrain.json"
    assert read_goodput(None) is None
    assert read_goodput(str(file)) is None
    file.write_text(json.dumps(DOCUMENT))
    assert read_goodput(str(file)) == DOCUMENT
    file.write_text("[]")
    with pytest.raises(ArtifactError, match=r"pretrain\.json: not an account of a run's time"):
        read_goodput(str(file))
