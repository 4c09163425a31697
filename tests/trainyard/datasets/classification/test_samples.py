"""Samples of a classifier against the rows of Megatron-LM's tasks by hand, and its epochs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainyard.datasets.classification.glue import Pair
from trainyard.datasets.classification.race import RaceQuestion
from trainyard.datasets.classification.samples import ClassifierSamples, Epochs, read_examples
from trainyard.errors import DataError
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d", "?"]
CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    file = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    file.write_text("\n".join(WORDS) + "\n")
    config = TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(file))
    return build_tokenizer(config)


def test_a_pair_is_a_row_with_types_and_padding(tokenizer: object) -> None:
    samples = ClassifierSamples.of("MNLI", [Pair("a b", "c", 2)], tokenizer, 8)
    sample = samples[0]
    assert sample["text"].tolist() == [[CLS, 5, 6, SEP, 7, SEP, 0, 0]]
    assert sample["types"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0]]
    assert sample["padding_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]
    assert (sample["label"], sample["loss_mask"].tolist()) == (2, [1.0])


def test_a_row_that_is_too_long_loses_the_end_of_its_second_text(tokenizer: object) -> None:
    (sample,) = ClassifierSamples.of("QQP", [Pair("a b", "c d c d c d", 1)], tokenizer, 7)
    assert sample["text"].tolist() == [[CLS, 5, 6, SEP, 7, 8, SEP]]
    assert sample["types"].tolist() == [[0, 0, 0, 0, 1, 1, 1]]
    (cut,) = ClassifierSamples.of("QQP", [Pair("a b c d a b", "c", 1)], tokenizer, 6)
    assert cut["text"].tolist() == [[CLS, 5, 6, 7, 8, SEP]]
    assert cut["types"].tolist() == [[0, 0, 0, 0, 0, 1]]


def test_a_question_is_a_row_for_each_option(tokenizer: object) -> None:
    question = RaceQuestion("d d", "a ?", ("b", "c", "a", "d"), 3)
    (sample,) = ClassifierSamples.of("RACE", [question], tokenizer, 8)
    assert sample["text"].shape == (4, 8)
    assert sample["text"][1].tolist() == [CLS, 5, 9, 7, SEP, 8, 8, SEP]
    assert sample["label"] == 3
    long = RaceQuestion("d", "a " * 200, ("b", "c", "a", "d"), 0)
    (cut,) = ClassifierSamples.of("RACE", [long], tokenizer, 140)
    assert cut["text"][0].tolist().index(SEP) == 129  # behind [CLS] and 128 tokens


def test_every_epoch_has_every_example_once_and_fills_up_with_what_does_not_count(
    tokenizer: object,
) -> None:
    samples = ClassifierSamples.of("QQP", [Pair("a", "b", 0)] * 10, tokenizer, 8)
    epochs = Epochs(samples, per_epoch=12, num_epochs=2, seed=7)
    ids = epochs.ids(np.arange(len(epochs)))
    counted = [bool(epochs[index]["loss_mask"][0]) for index in range(len(epochs))]
    for epoch in range(2):
        own = range(12 * epoch, 12 * epoch + 12)
        assert [counted[index] for index in own] == [True] * 10 + [False] * 2
        assert sorted(ids[own.start : own.start + 10, 1]) == list(range(10))
        assert set(ids[own.start : own.stop, 0]) == {epoch}
    assert ids[:10, 1].tolist() != ids[12:22, 1].tolist()
    shorter = Epochs(samples, per_epoch=8, num_epochs=3, seed=7)
    assert all(shorter[index]["loss_mask"][0] for index in range(24))


def test_questions_of_race_have_four_options(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text(
        '{"article": "x", "questions": ["q"], "options": [["a", "b"]], "answers": ["A"]}'
    )
    with pytest.raises(DataError, match="question 0, from 0, has 2 options, and those of RACE"):
        read_examples(str(tmp_path), "RACE")
