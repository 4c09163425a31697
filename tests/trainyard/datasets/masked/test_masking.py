"""Hiding words: its laws, and the rule written out slowly."""

from __future__ import annotations

import numpy as np
import pytest

from trainyard.datasets.masked.config import MaskedConfig
from trainyard.datasets.masked.masking import (
    BertReplacement,
    Masked,
    MaskingRule,
    Replacement,
    find_words,
    mask_words,
    sample_generator,
)
from trainyard.errors import ConfigError

CLS, SEP, MASK, VOCABULARY = 1, 2, 3, 100
BEGINS = np.arange(VOCABULARY) % 3 > 0
"""Every third id continues a word."""

RULES = {
    "bert": MaskingRule(),
    "longer": MaskingRule(use_longer_ngrams=True),
    "half": MaskingRule(mask_prob=0.5, max_ngram=2),
    "spans": MaskingRule(max_ngram=10, use_geometric_distribution=True),
    "permuted": MaskingRule(do_permutation=True),
}


def sample(seed: int, length: int) -> np.ndarray:
    random = np.random.RandomState(seed)
    body = random.randint(4, VOCABULARY, length)
    return np.array([CLS, *body[: length // 2], SEP, *body[length // 2 :], SEP])


def slow_masking(
    tokens: list[int],
    budget: float,
    rule: MaskingRule,
    random: np.random.RandomState,
    replacement: Replacement | None,
) -> tuple[list[int], dict[int, int], list[list[int]]]:
    """The rule with a list for everything: tokens, labels by place, spans as chosen."""
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token in (CLS, SEP):
            continue
        if words and not BEGINS[token]:
            words[-1].append(place)
        else:
            words.append([place])
    sizes = np.arange(1, rule.max_ngram + 1)
    shares = (1 / sizes) / (1 / sizes).sum()
    if rule.use_longer_ngrams:
        shares = shares[::-1]
    order = list(range(len(words)))
    random.shuffle(order)
    result, labels, spans = list(tokens), {}, []

    def choose(word: int, count: int, geometric: bool) -> list[int] | None:
        size = (
            min(random.geometric(0.2), rule.max_ngram)
            if geometric
            else random.choice(sizes, p=shares / shares.sum())
        )
        for smaller in range(size, 0, -1):
            places = [place for w in words[word : word + smaller] for place in w]
            if count + len(places) <= budget:
                return None if any(place in labels for place in places) else places
        return None

    for word in order:
        if len(labels) >= budget or (rule.do_permutation and len(labels) + 1 > budget):
            break
        places = choose(word, len(labels), rule.use_geometric_distribution)
        if places is None:
            continue
        for place in places:
            labels[place] = tokens[place]
            drawn = replacement(random) if replacement else None
            if drawn is not None:
                result[place] = drawn
        spans.append(places)
    if rule.do_permutation:
        random.shuffle(order)
        moved: list[int] = []
        for word in order:
            if len(moved) + 1 > budget:
                break
            places = choose(word, len(moved), False)
            if places is not None:
                moved += places
                labels |= {place: tokens[place] for place in places}
        moved.sort()
        sources = list(moved)
        random.shuffle(sources)
        before = list(result)
        for place, source in zip(moved, sources, strict=True):
            result[place] = before[source]
    return result, labels, spans


def masked(seed: int, length: int, rule: MaskingRule) -> tuple[np.ndarray, Masked, float]:
    tokens = sample(seed, length)
    budget = rule.budget(len(tokens), length)
    words = find_words(tokens, BEGINS, (CLS, SEP))
    random = sample_generator(1234, seed)
    return tokens, mask_words(tokens, words, budget, rule, random, REPLACEMENT), budget


REPLACEMENT = BertReplacement(MASK, VOCABULARY)


@pytest.mark.parametrize("name", RULES)
def test_words_are_hidden_as_by_the_slow_rule(name: str) -> None:
    rule = RULES[name]
    for seed in range(40):
        tokens, found, budget = masked(seed, 5 + 3 * seed, rule)
        wanted = slow_masking(
            tokens.tolist(), budget, rule, sample_generator(1234, seed), REPLACEMENT
        )
        assert (np.diff(found.places) > 0).all()
        labels = dict(zip(found.places.tolist(), found.labels.tolist(), strict=True))
        assert (found.tokens.tolist(), labels, found.spans) == (
            wanted[0],
            dict(sorted(wanted[1].items())),
            wanted[2],
        )


@pytest.mark.parametrize("name", RULES)
def test_the_budget_is_kept_and_spent_but_for_less_than_a_word(name: str) -> None:
    rule = RULES[name]
    for seed in range(30):
        tokens, found, budget = masked(seed, 200, rule)
        hidden = sum(map(len, found.spans))
        assert hidden <= budget
        longest = max(len(run) for run in np.split(tokens, np.flatnonzero(BEGINS[tokens])))
        assert hidden > budget - longest
        assert len(found.places) <= (2 if rule.do_permutation else 1) * budget


def test_words_are_hidden_whole_and_marks_never() -> None:
    for seed in range(30):
        tokens, found, _ = masked(seed, 100, RULES["bert"])
        hidden = set(found.places.tolist())
        words = find_words(tokens, BEGINS, (CLS, SEP))
        for first, end in zip(words.starts[:-1], words.starts[1:], strict=True):
            word = set(words.places[first:end])
            assert word <= hidden or not word & hidden
        assert not hidden & set(np.flatnonzero(np.isin(tokens, (CLS, SEP))).tolist())


def test_of_a_hundred_tokens_eighty_become_the_mask_and_ten_stay() -> None:
    random = np.random.RandomState(0)
    drawn = [REPLACEMENT(random) for _ in range(20_000)]
    assert abs(drawn.count(MASK) / len(drawn) - 0.801) < 0.01  # one in a hundred any is the mask
    assert abs(drawn.count(None) / len(drawn) - 0.1) < 0.01


def test_without_beginnings_every_token_is_a_word() -> None:
    tokens = np.array([CLS, 9, 12, SEP, 15])
    assert find_words(tokens, None, (CLS, SEP)).starts == [0, 1, 2, 3]
    assert find_words(tokens, BEGINS, (CLS, SEP)).starts == [0, 3]  # all go on: one word
    empty = find_words(np.array([CLS, SEP]), BEGINS, (CLS, SEP))
    found = mask_words(np.array([CLS, SEP]), empty, 1, MaskingRule(), np.random.RandomState(0))
    assert not found.spans
    assert not len(found.places)


def test_the_global_generator_is_left_alone() -> None:
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()
    masked(3, 100, RULES["permuted"])
    assert np.random.get_state()[1].tolist() == before


def test_invalid_rules_are_refused() -> None:
    with pytest.raises(ConfigError, match="--mask-prob"):
        MaskingRule(mask_prob=1.0)
    with pytest.raises(ConfigError, match="--mask-prob"):
        MaskedConfig(mask_prob=0.0)
    with pytest.raises(ConfigError, match="--short-seq-prob"):
        MaskedConfig(short_seq_prob=1.5)
    with pytest.raises(ConfigError, match="exclude each other"):
        MaskingRule(use_geometric_distribution=True, do_permutation=True)
    with pytest.raises(ConfigError, match="max_ngram"):
        MaskingRule(max_ngram=0)
