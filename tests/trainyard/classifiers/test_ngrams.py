"""The local classifier, and the labelled texts that it is trained on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tests.stages.clean_runs import write
from trainyard.classifiers.examples import (
    Examples,
    is_held_out,
    read_examples,
    train_classifier,
)
from trainyard.classifiers.ngrams import EPOCHS, NUM_FEATURES, area_under_roc, features, train
from trainyard.errors import DataError

KIND = ["the", "garden", "is", "quiet", "and", "people", "help", "each", "other", "with", "words"]
RUDE = ["you", "fools", "are", "dull", "and", "nobody", "wants", "to", "hear", "your", "noise"]


def examples(count: int, seed: int = 1) -> Examples:
    draw = random.Random(seed)
    labels = [draw.randint(0, 1) for _ in range(count)]
    texts = [" ".join(draw.choices(RUDE if label else KIND, k=8)) for label in labels]
    return Examples(texts, [float(label) for label in labels])


def test_a_text_is_its_words_and_pairs_each_once() -> None:
    assert len(features("You, you FOOLS")) == len({"you", "fools", "you you", "you fools"}) + 1
    assert features("").tolist() == [NUM_FEATURES]


def test_it_tells_new_texts_apart() -> None:
    epochs: list[int] = []
    classifier, measured = train_classifier(examples(150), epochs.append)
    assert sum(epochs) == EPOCHS
    assert measured["trained_on"] + measured["held_out"] == 150
    assert measured["held_out"] > 5
    assert measured["accuracy"] == measured["area_under_roc"] == 1.0
    kind, rude = classifier.score([" ".join(KIND[:6]), " ".join(RUDE[:6])])
    assert kind < 0.1 < 0.9 < rude


def test_the_same_examples_give_the_same_weights() -> None:
    one, other = (train(*_both(examples(30))) for _ in range(2))
    np.testing.assert_array_equal(one.weights, other.weights)


def test_probabilities_are_labels_too() -> None:
    """Texts that are toxic to two of three readers get about that score."""
    classifier = train(["a b", "c d"] * 60, [2 / 3, 0.0] * 60)
    np.testing.assert_allclose(classifier.score(["a b", "c d"]), [2 / 3, 0.0], atol=0.1)


def _both(found: Examples) -> tuple[list[str], list[float]]:
    return found.texts, found.labels


def test_the_area_counts_pairs() -> None:
    scores, is_positive = np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, True, False, True])
    assert area_under_roc(scores, is_positive) == (0.5 + 1 + 1 + 1) / 4
    assert area_under_roc(scores, np.ones(4, bool)) is None


def test_both_kinds_are_needed_beside_what_is_held_out(tmp_path: Path) -> None:
    """The only toxic example trains nothing when it is held out."""
    held = next(text for n in range(100) if is_held_out(text := f"fool {n}"))
    rows = [{"text": held, "label": 1}, *({"text": f"kind {n}", "label": 0} for n in range(20))]
    path = write(tmp_path / "labels.jsonl", rows)
    with pytest.raises(DataError, match=r"needs more examples: of the .* to train on, 0 have"):
        read_examples(str(path))
    write(
        path, [*rows, {"text": next(t for t in ("a", "b", "c") if not is_held_out(t)), "label": 1}]
    )
    assert len(read_examples(str(path)).texts) == 22


def test_half_a_character_is_no_word(tmp_path: Path) -> None:
    r"""JSON may have a lone surrogate, \ud83d; UTF-8 has none."""
    path = tmp_path / "labels.jsonl"
    lines = [{"text": f"fool \ud83d {n}", "label": n % 2} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_examples(str(path))
    classifier, _ = train_classifier(found)
    assert classifier.score(["fool \ud83d"]) == classifier.score(["fool"])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"text": "a", "label": 1}], "of the 1 to train on, 1 have a 'label' of 0.5 or more"),
        ([{"text": "a", "label": 2}], "line 1: is no object with a text in 'text' and a number"),
        ([{"text": "a", "label": 1}, {"text": 3, "label": 0}], "line 2: is no object"),
        ([{"text": "a", "label": None}], "line 1: is no object"),
        ([{"text": "a", "label": True}], "line 1: is no object"),
        ([["a"]], "line 1: is no object"),
    ],
)
def test_other_lines_are_refused(tmp_path: Path, rows: list[object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_examples(str(write(tmp_path / "labels.jsonl", rows)))
