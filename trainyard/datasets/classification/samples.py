"""Examples of RACE, MNLI and QQP as the samples of a classifier, by Megatron-LM's tasks.

    [CLS] first [SEP] second [SEP] padding          types 0 up to the first [SEP], then 1

Of RACE, the first text is a question with an option, at most 128 tokens, and the second the
article; a sample has a row for each option. A row that is too long loses the end of its second
text. numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.classification.glue import SETS, Pair, read_pairs
from trainyard.datasets.classification.race import RaceQuestion, read_race
from trainyard.datasets.masked.sentences import special_id
from trainyard.datasets.plain_text import PlainText
from trainyard.errors import DataError

TaskName = Literal["RACE", "MNLI", "QQP"]

LONGEST_QUESTION = 128
"""Tokens of a question with an option."""
NUM_OPTIONS = 4

Example = Pair | RaceQuestion


def read_examples(url: str, task: TaskName) -> list[Any]:
    """The examples of a file, or of a folder of RACE. DataError for one of another layout."""
    if task != "RACE":
        return read_pairs(url, task)
    questions = read_race(url)
    other = next((n for n, one in enumerate(questions) if len(one.options) != NUM_OPTIONS), None)
    if other is not None:
        raise DataError(
            f"{url}: question {other}, from 0, has {len(questions[other].options)} options, and "
            f"those of RACE have {NUM_OPTIONS}"
        )
    return questions


def num_outputs(task: TaskName) -> int:
    """Outputs of the head for a row: classes, or 1 where each row is a choice."""
    return 1 if task == "RACE" else len(SETS[task].classes)


def rows_per_sample(task: TaskName) -> int:
    """Rows of a sample."""
    return NUM_OPTIONS if task == "RACE" else 1


@dataclass(frozen=True, slots=True)
class ClassifierSamples:
    """The samples of one data set, made when they are asked for; implements
    `user_datasets.Samples`."""

    task: TaskName
    examples: Sequence[Any]
    plain: PlainText
    cls_id: int
    sep_id: int
    pad_id: int
    length: int
    """Tokens of a row."""

    @classmethod
    def of(
        cls, task: TaskName, examples: Sequence[Any], tokenizer: Any, length: int
    ) -> ClassifierSamples:
        """By a `tokenizers.base.Tokenizer`; ConfigError for one without the tokens of a BERT."""
        return cls(
            task=task,
            examples=examples,
            plain=PlainText(tokenizer),
            cls_id=special_id(tokenizer, "cls", "BERT"),
            sep_id=special_id(tokenizer, "sep", "BERT"),
            pad_id=special_id(tokenizer, "pad", "BERT"),
            length=length,
        )

    def __len__(self) -> int:
        """Examples."""
        return len(self.examples)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """text, types and padding_mask (c, s) int64, label () int64, loss_mask (1,) float32."""
        example, plain = self.examples[index], self.plain
        if isinstance(example, RaceQuestion):
            article, label = plain.encode(example.article), example.answer
            firsts = [
                plain.encode(example.with_option(option))[:LONGEST_QUESTION]
                for option in range(len(example.options))
            ]
            rows = [self._row(first, article) for first in firsts]
        else:
            rows = [self._row(plain.encode(example.first), plain.encode(example.second))]
            label = example.label
        arrays = [np.stack(parts) for parts in zip(*rows, strict=True)]
        named = dict(zip(("text", "types", "padding_mask"), arrays, strict=True))
        return named | {"label": np.int64(label), "loss_mask": np.ones(1, np.float32)}

    def _row(self, first: list[int], second: list[int]) -> tuple[NDArray[np.int64], ...]:
        """Tokens, types, and 1 for each token that is no padding."""
        whole = [self.cls_id, *first, self.sep_id, *second]
        ids = [*whole[: self.length - 1], self.sep_id]
        boundary = min(len(first) + 2, self.length - 1)
        types = [0] * boundary + [1] * (len(ids) - boundary)
        text, kinds, kept = (np.zeros(self.length, np.int64) for _ in range(3))
        text[:] = self.pad_id
        text[: len(ids)], kinds[: len(ids)], kept[: len(ids)] = ids, types, 1
        return text, kinds, kept


@dataclass(frozen=True, slots=True)
class Epochs:
    """Samples in another order in every epoch; implements `user_datasets.Samples`.

    An epoch has a whole number of global batches: without its last, incomplete one, or filled up
    with samples that do not count."""

    samples: ClassifierSamples
    per_epoch: int
    """Samples of an epoch, those that do not count included."""
    num_epochs: int
    seed: int

    def __len__(self) -> int:
        """Of all epochs."""
        return self.per_epoch * self.num_epochs

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """As the samples themselves; loss_mask is 0 where it does not count."""
        number, counts = self._number(index)
        sample = self.samples[number]
        return sample if counts else {**sample, "loss_mask": np.zeros(1, np.float32)}

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2): the epoch, and the number of the example in its file."""
        found = [(index // self.per_epoch, self._number(index)[0]) for index in indices.tolist()]
        return np.array(found, np.int64).reshape(-1, 2)

    def _number(self, index: int) -> tuple[int, bool]:
        epoch, place = divmod(index, self.per_epoch)
        order = _order(self.seed, epoch, len(self.samples))
        return int(order[place % len(order)]), place < len(order)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)
