"""Results of evaluations that others wrote or broke end in a sentence, and steer no terminal."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages import compare, ensemble
from stages.report.card import render
from stages.report.facts import Card
from stages.report.lineage import Lineage
from tests.security.test_hostile_corpora import VALUES, changed, places
from tests.stages.html_page import check_sound

SECRET = "/etc/passwd"
ESCAPE = "\x1b]0;owned\x07\u202e"
FIGURE = {
    "total": "is_right",
    "weight": None,
    "better": "higher",
    "factor": 1.0,
    "exponential": False,
    "of_tokens": False,
}
PASSPORT = {
    "protocol": {"name": "p", "digest": "d", "definition": {}},
    "data": {"digest": "d", "examples": 2},
    "checkpoint": {"digest": "d", "step": 1},
    "tokenizer": {"digest": "d", "type": "t", "vocab_size": 9},
    "code": {"version": "1", "digest": "d"},
    "figures": {"accuracy": FIGURE},
}
ROWS = [{"example": i, "gold": 1, "is_right": 1, "probabilities": [0.2, 0.8]} for i in (0, 1)]


def write(folder: Path, at: tuple[Any, ...], value: Any, rows: str | None) -> str:
    """A folder of an evaluation in which one value of the data set is another."""
    found = {"name": "set", "rows": "predictions.jsonl", "passport": copy.deepcopy(PASSPORT)}
    place: Any = found
    for key in at[:-1]:
        place = place[key]
    if at:
        place[at[-1]] = value
    folder.mkdir()
    document = {"format_version": 2, "task": "T", "step": 1, "sets": [found]}
    (folder / "results.json").write_text(json.dumps(document))
    lines = "".join(json.dumps(row) + "\n" for row in ROWS) if rows is None else rows
    (folder / "predictions.jsonl").write_text(lines)
    return str(folder)


def row(**changed: Any) -> str:
    return "".join(json.dumps({**one, **changed}) + "\n" for one in ROWS)


DOCUMENTS: list[tuple[tuple[Any, ...], Any]] = [
    (("rows",), f"../../../..{SECRET}"),
    (("rows",), SECRET),
    (("rows",), "file:///etc/passwd"),
    (("rows",), "a/../../b"),
    (("rows",), "predictions.jsonl\0"),
    (("rows",), ""),
    (("rows",), "absent.jsonl"),
    (("name",), ["list"]),
    (("passport",), 7),
    (("passport", "protocol"), [ESCAPE]),
    (("passport", "protocol", "digest"), {}),
    (("passport", "code"), [1]),
    (("passport", "code"), "x"),
    (("passport", "figures"), []),
    (("passport", "figures", "accuracy"), 7),
    (("passport", "figures", "accuracy", "better"), ["higher"]),
    (("passport", "figures", "accuracy", "factor"), 10**400),
    (("passport", "figures", "accuracy", "factor"), float("nan")),
    (("passport", "figures", "accuracy", "total"), "absent"),
    (("passport", "figures", "accuracy", "weight"), "absent"),
]
ROW_FILES = {
    "empty": "",
    "no JSON": "\0\n",
    "deep": "[" * 50_000,
    "a list": "[1]\n",
    "no example": row(example="0"),
    "a text": row(is_right="many"),
    "a table": row(is_right={}),
    "a number beyond doubles": row(is_right=10**400),
    "NaN": row(is_right=float("nan")),
    "infinity": row(is_right=float("inf")),
    "no classes": row(probabilities=[]),
    "texts of classes": row(probabilities=["a", "b"]),
    "lists of classes": row(probabilities=[[0.1], [0.9]]),
    "probabilities beyond doubles": row(probabilities=[10**400, 1]),
    "probabilities that are none": row(probabilities=[float("nan"), 1.0]),
    "a gold class of lists": row(gold=[1]),
}
PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "compare": compare.main,
    "ensemble": ensemble.main,
}
each_program = pytest.mark.parametrize("program", PROGRAMS)


def check(
    program: str, folder: Path, hostile: str, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """The exit status and the words of a program on one good folder and one that is not."""
    good = write(folder / "good", (), None, None)
    for pair in ([good, hostile], [hostile, good]):
        status = PROGRAMS[program](pair)
        told = capfd.readouterr()
        words = told.out + told.err
        assert status in (0, 1, 2), words
        assert "Traceback" not in words
        assert "root:" not in words
        assert all(c.isprintable() or c == "\n" for c in words)
    return status, words


@pytest.mark.few_cases(8)
@each_program
@pytest.mark.parametrize(("at", "value"), DOCUMENTS, ids=lambda x: repr(x)[:40])
def test_a_hostile_passport_is_a_sentence(
    program: str, at: tuple[Any, ...], value: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check(program, tmp_path, write(tmp_path / "evil", at, value, None), capfd)


@pytest.mark.few_cases(8)
@each_program
@pytest.mark.parametrize("rows", ROW_FILES.values(), ids=ROW_FILES)
def test_a_hostile_row_is_a_sentence(
    program: str, rows: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check(program, tmp_path, write(tmp_path / "evil", (), None, rows), capfd)


@each_program
@pytest.mark.parametrize(
    "at",
    [
        ("name",),
        ("passport", "protocol", "name"),
        ("passport", "checkpoint", "digest"),
        ("passport", "tokenizer", "digest"),
    ],
    ids=lambda at: at[-2:],
)
def test_a_name_steers_no_terminal(
    program: str, at: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check(program, tmp_path, write(tmp_path / "evil", at, ESCAPE, None), capfd)


PARITY = {
    "step": 3,
    "precision": "fp32",
    "tolerance": 0.001,
    "rows": [{"engine": "static", "max_difference": 1e-4, "mean_difference": 1e-5}],
}


@pytest.mark.slow
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_parity_of_others_is_on_the_card_as_text(value: object) -> None:
    lineage = Lineage(artifacts=(), edges=(), destination="")
    for at in places(PARITY):
        card = Card(title="run", lineage=lineage, parity=changed(PARITY, at, value))
        check_sound(render(card))
