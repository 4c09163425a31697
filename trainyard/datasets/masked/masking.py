"""Chooses the words of a sample that a model must predict, and their replacements.

Whole words are hidden in runs of one to n, chosen in a random order until a budget of tokens is
spent. A pure function of (tokens, rule, generator): the draws come in Megatron-LM's order, and
each sample has a separate generator, so that it does not depend on the order of access.
Knows nothing of files or torch."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ConfigError

GEOMETRIC = 0.2
"""The p of SpanBERT's geometric distribution (arXiv:1907.10529, section 3.1)."""

TO_MASK, TO_RANDOM = 0.8, 0.5
"""Share of the chosen tokens that become the mask, and share of the others that become any
token."""

Replacement = Callable[[np.random.RandomState], int | None]
"""Draws the replacement of a chosen token; None leaves the token."""


@dataclass(frozen=True, slots=True)
class MaskingRule:
    """How much is hidden, in what pieces."""

    mask_prob: float = 0.15
    max_ngram: int = 3
    """Words of the longest run."""
    use_longer_ngrams: bool = False
    """Run lengths are drawn in proportion to 1/n; with this, that order of shares reversed."""
    use_geometric_distribution: bool = False
    """Draw run lengths from a geometric distribution instead, cut at `max_ngram`."""
    do_permutation: bool = False
    """Besides, shuffle as many other words among their places, to be found as well."""

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn."""
        if not 0 < self.mask_prob < 1:
            raise ConfigError(f"--mask-prob must be between 0 and 1, got {self.mask_prob}")
        if self.max_ngram < 1:
            raise ConfigError(f"max_ngram must be at least 1, got {self.max_ngram}")
        if self.use_geometric_distribution and self.do_permutation:
            raise ConfigError("use_geometric_distribution and do_permutation exclude each other")

    def budget(self, num_tokens: int, target_length: int) -> float:
        """Most tokens to hide of a sample."""
        return min(self.mask_prob * target_length, max(1, round(num_tokens * self.mask_prob)))


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a sample: word w is the tokens at places[starts[w]:starts[w + 1]]."""

    places: list[int]
    """Of all tokens that may be hidden."""
    starts: list[int]

    def __len__(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True, slots=True)
class Masked:
    """A sample with its chosen tokens replaced."""

    tokens: NDArray[np.int64]
    places: NDArray[np.int64]
    """Of the tokens to find, ascending."""
    labels: NDArray[np.int64]
    """The tokens to find."""
    spans: list[list[int]]
    """The places of each run that was hidden, in the order in which they were chosen."""


class _Generators(threading.local):
    """A generator for each thread: seeding one again costs a fifth of making one."""

    def __init__(self) -> None:
        self.random = np.random.RandomState(0)


_GENERATORS = _Generators()


def sample_generator(seed: int, index: int) -> np.random.RandomState:
    """The generator of one sample; this thread's only one, so done with the sample before."""
    random = _GENERATORS.random
    random.seed((seed + index) % 2**32)
    return random


@cache
def ngram_thresholds(max_ngram: int, longer: bool) -> list[float]:
    """A uniform draw below the n-th, and not below the one before, means n words."""
    shares = 1.0 / np.arange(1, max_ngram + 1)
    shares = shares / shares.sum()
    if longer:
        shares = shares[::-1]
    # Twice normalised, as by the library that Megatron-LM draws with: equal to the last bit.
    sums = np.cumsum(shares / shares.sum())
    thresholds: list[float] = (sums / sums[-1]).tolist()
    return thresholds


def find_words(
    tokens: NDArray[np.int64],
    begins_word: NDArray[np.bool_] | None,
    special: Sequence[int] = (),
) -> Words:
    """begins_word: (vocabulary,) whether a token begins a word; None if every one does. special:
    tokens never hidden.

    Tokens with nothing but special ones between them are one word where none but the first
    begins one."""
    ordinary = np.ones(len(tokens), bool)
    for token in special:
        ordinary &= tokens != token
    places = np.flatnonzero(ordinary)
    starts = np.arange(len(places))
    if begins_word is not None:
        begins = begins_word[tokens[places]]
        begins[:1] = True
        starts = np.flatnonzero(begins)
    return Words(places.tolist(), [*starts.tolist(), len(places)])


def mask_words(
    tokens: NDArray[np.int64],
    words: Words,
    budget: float,
    rule: MaskingRule,
    random: np.random.RandomState,
    replacement: Replacement | None = None,
) -> Masked:
    """Hide runs of words within a budget of tokens. Without a replacement the tokens stay, and
    the spans are the chosen words."""
    order = np.arange(len(words))
    random.shuffle(order)
    taken, result = bytearray(len(words.places)), tokens.copy()
    spans = []
    for places in _choose(order.tolist(), words, budget, rule, random, taken):
        spans.append(places)
        if replacement is not None:
            _replace(result, places, replacement, random)
    if rule.do_permutation:
        random.shuffle(order)
        _permute(result, order.tolist(), words, budget, rule, random, taken)
    found = np.array(words.places, np.int64)[np.frombuffer(taken, np.bool_)]
    return Masked(result, found, tokens[found], spans)


@dataclass(frozen=True, slots=True)
class BertReplacement:
    """80 % the mask, 10 % any token of the vocabulary, 10 % unchanged."""

    mask: int
    vocab_size: int

    def __call__(self, random: np.random.RandomState) -> int | None:
        """Draws."""
        if random.random_sample() < TO_MASK:
            return self.mask
        if random.random_sample() >= TO_RANDOM:
            return int(random.randint(0, self.vocab_size))
        return None


def _choose(
    order: list[int],
    words: Words,
    budget: float,
    rule: MaskingRule,
    random: np.random.RandomState,
    taken: bytearray,
) -> Iterator[list[int]]:
    """Runs of words within the budget that touch no used one, as places; marks them used."""
    starts, last = words.starts, len(words)
    thresholds = ngram_thresholds(rule.max_ngram, rule.use_longer_ngrams)
    count = 0
    for word in order:
        if count + 1 > budget:
            return
        if rule.use_geometric_distribution:
            length = min(int(random.geometric(GEOMETRIC)), rule.max_ngram)
        else:
            length = 1 + bisect_right(thresholds, random.random_sample())
        first, stop = starts[word], min(word + length, last)
        while count + starts[stop] - first > budget:
            stop -= 1
        end = starts[stop]
        if first < end and 1 not in taken[first:end]:
            taken[first:end] = b"\1" * (end - first)
            count += end - first
            yield words.places[first:end]


def _replace(
    tokens: NDArray[np.int64],
    places: list[int],
    replacement: Replacement,
    random: np.random.RandomState,
) -> None:
    for place in places:
        token = replacement(random)
        if token is not None:
            tokens[place] = token


def _permute(
    tokens: NDArray[np.int64],
    order: list[int],
    words: Words,
    budget: float,
    rule: MaskingRule,
    random: np.random.RandomState,
    taken: bytearray,
) -> None:
    """Shuffle the tokens of runs that are not used yet; marks them used."""
    runs = _choose(order, words, budget, rule, random, taken)
    places = np.sort(np.fromiter(chain.from_iterable(runs), np.int64))
    source = places.copy()
    random.shuffle(source)
    tokens[places] = tokens[source]
