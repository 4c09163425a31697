"""RACE, MNLI and QQP as published, and files that are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainyard.datasets.classification.glue import Pair, read_pairs
from trainyard.datasets.classification.race import RaceQuestion, read_race
from trainyard.datasets.classification.texts import clean_text
from trainyard.errors import DataError


def test_texts_are_cleaned_as_upstream_does() -> None:
    assert clean_text("a \n\n b . c . d\te") == "a b. c. d e"
    assert clean_text(" \n ") == ""


def test_an_option_takes_the_place_of_the_blank_or_follows_the_question() -> None:
    blank = RaceQuestion("x", "It was _ that day .", ("hot", "cold"), 0)
    assert blank.with_option(1) == "It was cold that day ."
    asked = RaceQuestion("x", "How was it?", ("hot", "cold"), 0)
    assert asked.with_option(0) == "How was it? hot"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"questions": []}, "not an object with a string 'article'"),
        ({"answers": ["E"]}, "answer 'E' is no letter of 2 options"),
        ({"answers": ["AB"]}, "answer 'AB' is no letter"),
        ({"options": [["a", 1]]}, "not a list of 2 to 26 strings"),
        ({"options": []}, "are not lists of one length"),
        ({"questions": [1]}, "'questions' is not a list of strings"),
    ],
)
def test_a_file_that_is_none_of_race_is_named(
    tmp_path: Path, record: dict[str, object], message: str
) -> None:
    whole = {"article": "x", "questions": ["q"], "options": [["a", "b"]], "answers": ["A"]}
    if "article" in message:
        whole.pop("article")
    (tmp_path / "1.txt").write_text(json.dumps(whole | record))
    with pytest.raises(DataError, match=rf"1\.txt: line 1: .*{message}"):
        read_race(str(tmp_path))


def test_columns_are_those_that_megatron_reads(tmp_path: Path) -> None:
    file = tmp_path / "x.tsv"
    row = "\t".join(["0", *"abcdefg", "A man .", "A person."])
    file.write_text(f"head\n{row}\tneutral\n")
    assert read_pairs(str(file), "MNLI") == [Pair("A man .", "A person.", 2)]
    file.write_text(f"head\n{row}\n")  # 10 columns: the test set, without labels
    assert read_pairs(str(file), "MNLI")[0].label == 0
    file.write_text("head\n1\t2\t3\tone\ttwo\t1\n7\tbroken\n8\t2\t3\t\ttwo\t0\n")
    assert read_pairs(str(file), "QQP") == [Pair("one", "two", 1)]
    file.write_text(f"head\n{row}\tmaybe\n")
    with pytest.raises(
        DataError, match=r"x\.tsv: line 2: class 'maybe' is not one of contradiction"
    ):
        read_pairs(str(file), "MNLI")
    file.write_text("head\n")
    with pytest.raises(DataError, match="no pair of QQP below the headings"):
        read_pairs(str(file), "QQP")
