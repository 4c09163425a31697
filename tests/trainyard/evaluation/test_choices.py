"""Multiple choice by likelihood: published layouts, sums by hand, and chance."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.trainyard.evaluation.models import byte_tokenizer, random_model, repeating_model
from trainyard.errors import DataError
from trainyard.evaluation.choices import open_choices, read_choices
from trainyard.evaluation.config import EvaluationConfig
from trainyard.evaluation.scoring import Scorer

CONFIG = EvaluationConfig(task="MULTIPLE-CHOICE")


def written(file: Path, *records: object) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def test_the_likeliest_choice_is_chosen_by_its_sum_and_by_bytes(tmp_path: Path) -> None:
    choices = ["ab", "aaaaaaaa"]
    url = written(tmp_path / "c.jsonl", {"query": "aaa", "choices": choices, "gold": 1})
    examples = open_choices(url, CONFIG, Scorer(repeating_model(32)), byte_tokenizer())
    (row,) = examples.score(range(1))
    short, long = row["losses"]
    # Each choice has a space before it; then one jump to a, then a jump to b or seven repetitions.
    assert row["is_right"] == int(long < short)
    assert row["is_right_norm"] == int(long / 9 < short / 3) == 1
    assert row["probabilities"][1] == pytest.approx(
        math.exp(-long) / (math.exp(-long) + math.exp(-short))
    )
    numbers = examples.summarize([row]).numbers
    assert (numbers["accuracy_norm"], numbers["num_examples"]) == (1.0, 1)


def test_published_sets_become_choices(shared: Path) -> None:
    layout, race = read_choices(str(shared / "data/eval/RACE/dev/middle"))
    assert layout == "RACE"
    assert len(race) == 81
    assert all(len(one.texts) == 4 and 0 <= one.gold < 4 for one in race)
    layout, mnli = read_choices(str(shared / "data/eval/glue/MNLI/dev_matched.tsv"))
    assert (layout, len(mnli)) == ("MNLI", 700)
    assert mnli[0].context.startswith("In Temple Bar, the bookshop")
    assert mnli[0].texts[mnli[0].gold] == " True"
    layout, qqp = read_choices(str(shared / "data/eval/glue/QQP/dev.tsv"))
    assert (layout, len(qqp), qqp[0].texts[qqp[0].gold]) == ("QQP", 50, " no")


def test_a_random_model_scores_chance(tmp_path: Path) -> None:
    # Choices are one letter each, so that none is likelier for its length.
    records = [
        {"query": f"{n * 7919 % 1000}?", "choices": ["w", "x", "y", "z"], "gold": n % 4}
        for n in range(400)
    ]
    url = written(tmp_path / "c.jsonl", *records)
    examples = open_choices(url, CONFIG, Scorer(random_model(16), batch_size=64), byte_tokenizer())
    rows = examples.score(range(400))
    summary = examples.summarize(rows)
    figure = summary.documents(rows)["accuracy"]
    assert figure["stderr"] == pytest.approx(math.sqrt(0.25 * 0.75 / 400), rel=0.1)
    assert abs(figure["value"] - 0.25) < 4 * figure["stderr"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"query": "a", "choices": "bc", "gold": 0}, "a list of strings 'choices'"),
        ({"query": "a", "choices": ["b", "c"], "gold": 2}, "'gold' is not the number of one of"),
    ],
)
def test_records_that_are_no_choice_are_refused(
    tmp_path: Path, record: object, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_choices(written(tmp_path / "c.jsonl", record))


def test_files_of_no_known_layout_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("a\tb\n1\t2\n")
    with pytest.raises(DataError, match="neither those of MNLI nor those of QQP"):
        read_choices(str(tmp_path / "x.tsv"))
    with pytest.raises(DataError, match=r"no \.txt file, and RACE has one for each article"):
        read_choices(str(tmp_path / "empty"))
