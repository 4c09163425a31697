"""BERT samples: two runs of sentences, some words of which are hidden.

    [CLS] A [SEP] B [SEP]      A and B of one document, B after A or, for half of them, before it

The items are those of Megatron-LM, drawn in its order, with two exceptions: padding is 0 in `types`
and `padding_mask` for any pad id, and permutations of words use the sample's own generator. An item
depends only on the seed and its number."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.masked.config import MaskedConfig
from trainyard.datasets.masked.mapping import MappingRule
from trainyard.datasets.masked.masking import (
    BertReplacement,
    MaskingRule,
    find_words,
    mask_words,
    sample_generator,
)
from trainyard.datasets.masked.sentences import (
    NOT_ASKED,
    SentenceDataset,
    mask_of,
    padded,
    special_id,
    word_beginnings,
)
from trainyard.datasets.sample_format import Sample
from trainyard.errors import ConfigError

MARKS = 3
"""[CLS] and two [SEP]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BertFormat:
    """How sentences become a sample; the same for all sources of a run."""

    seq_length: int
    seed: int
    vocab_size: int
    cls: int
    sep: int
    mask: int
    pad: int
    begins_word: NDArray[np.bool_] | None = None
    """(vocabulary,) whether a token begins a word; None if every one does."""
    binary_head: bool = True
    """Whether a sample has two runs of sentences, whose order the model predicts, or one."""
    short_seq_prob: float = 0.1
    masking: MaskingRule = field(default_factory=MaskingRule)

    def __post_init__(self) -> None:
        """Refuse a length without room for text."""
        if self.seq_length < MARKS + 2:
            raise ConfigError(f"--seq-length {self.seq_length}: BERT samples need {MARKS + 2}")

    @staticmethod
    def of(
        tokenizer: object, data: MaskedConfig, seq_length: int, seed: int, binary_head: bool = True
    ) -> BertFormat:
        """With the special tokens of a WordPiece tokenizer."""
        marks = {
            name: special_id(tokenizer, name, "BERT") for name in ("cls", "sep", "mask", "pad")
        }
        vocab_size = special_id(tokenizer, "vocab_size", "BERT")
        begins_word = word_beginnings(tokenizer, vocab_size)
        if begins_word is None:
            raise ConfigError(
                "the tokenizer does not know which of its tokens begin a word, but BERT hides "
                "whole words; use --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase"
            )
        return BertFormat(
            seq_length=seq_length,
            seed=seed,
            vocab_size=vocab_size,
            begins_word=begins_word,
            binary_head=binary_head,
            short_seq_prob=data.short_seq_prob,
            masking=MaskingRule(mask_prob=data.mask_prob),
            **marks,
        )

    @property
    def mapping(self) -> MappingRule:
        """The rule that gathers sentences into samples."""
        shortest = 2 if self.binary_head else 1
        return MappingRule(self.seq_length - MARKS, self.short_seq_prob, self.seed, shortest)


class BERTDataset(SentenceDataset[BertFormat]):
    """Samples of one token file of sentences, over a range of its documents."""

    def __getitem__(self, index: int) -> Sample:
        """text, types, labels, padding_mask int64 (s,), loss_mask float32 (s,); is_random and
        truncated, 0 or 1. Labels are -1 for tokens that the model need not predict."""
        sample_format, random = self.sample_format, sample_generator(self.sample_format.seed, index)
        target = self.samples.target_length(index)
        first, second, is_random = self._pair(index, random)
        fits = len(first) + len(second) <= target
        first, second = trim(first, second, target, random)
        text, num_first = self._joined(first, second)
        words = find_words(text, sample_format.begins_word, (sample_format.cls, sample_format.sep))
        budget = sample_format.masking.budget(len(text), target)
        replacement = BertReplacement(sample_format.mask, sample_format.vocab_size)
        masked = mask_words(text, words, budget, sample_format.masking, random, replacement)
        labels = np.full(sample_format.seq_length, NOT_ASKED, np.int64)
        labels[masked.places] = masked.labels
        types = mask_of(len(text), sample_format.seq_length)
        types[:num_first] = 0
        return {
            "text": padded(masked.tokens, sample_format.seq_length, sample_format.pad),
            "types": types,
            "labels": labels,
            "is_random": np.array(is_random, np.int64),
            "padding_mask": mask_of(len(text), sample_format.seq_length),
            "loss_mask": (labels != NOT_ASKED).astype(np.float32),
            "truncated": np.array(not fits, np.int64),
        }

    def _pair(
        self, index: int, random: np.random.RandomState
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
        """A, B, and whether B came before A in the document."""
        sentences = self.samples.sentences(index)
        if not self.sample_format.binary_head:
            return self.samples.tokens(sentences), np.empty(0, np.int64), False
        pivot = int(random.randint(1, len(sentences))) if len(sentences) > 2 else 1
        is_random = bool(random.random_sample() < 0.5)
        first = self.samples.tokens(sentences[:pivot])
        second = self.samples.tokens(sentences[pivot:])
        return (second, first, True) if is_random else (first, second, False)

    def _joined(
        self, first: NDArray[np.int64], second: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], int]:
        """The text with its marks, and the number of tokens that belong to A."""
        cls, sep = np.array([self.sample_format.cls]), np.array([self.sample_format.sep])
        parts = [cls, first, sep, second, sep] if len(second) else [cls, first, sep]
        return np.concatenate(parts), len(first) + 2


def trim(
    first: NDArray[np.int64],
    second: NDArray[np.int64],
    target: int,
    random: np.random.RandomState,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut both to a joint length, token by token from a random end of the longer one."""
    excess = len(first) + len(second) - target
    if excess <= 0:
        return first, second
    lead = abs(len(first) - len(second))
    of_first = np.zeros(excess, bool)
    of_first[:lead] = len(first) > len(second)
    of_first[lead + 1 :: 2] = True  # once they are equal, alternate, beginning with the second
    at_front = random.random_sample(excess) < 0.5
    return _cut(first, of_first, at_front), _cut(second, ~of_first, at_front)


def _cut(
    tokens: NDArray[np.int64], ours: NDArray[np.bool_], at_front: NDArray[np.bool_]
) -> NDArray[np.int64]:
    front = int((ours & at_front).sum())
    return tokens[front : len(tokens) - int((ours & ~at_front).sum())]
