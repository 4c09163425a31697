"""Which sentences make up a sample: Megatron-LM's rows, and the rule written out slowly."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from trainyard.datasets.masked import mapping
from trainyard.datasets.masked.mapping import (
    MappingRule,
    Twister32,
    Twister64,
    build_mapping,
    shuffled_order,
)
from trainyard.errors import DataError

GOLDEN_ARGUMENTS = (
    "args(num_epochs,max_num_samples,max_seq_length,short_seq_prob,seed,verbose,min_num_sent)"
)
UNLIMITED = 2**63 - 1


def slow_mapping(
    lengths: list[int], bounds: list[int], rule: MappingRule, num_samples: int | None
) -> list[list[int]]:
    """One sentence after the other."""
    draws = Twister32(rule.seed)

    def target() -> int:
        if not rule.short_ratio:
            return rule.max_length
        draw = int(draws.draw(1)[0])
        return rule.max_length if draw % rule.short_ratio else 2 + draw % (rule.max_length - 1)

    rows: list[list[int]] = []
    while not rows or (num_samples is not None and len(rows) < num_samples):
        for first, last in itertools.pairwise(bounds):
            long = last - first > 1 and max(lengths[first:last]) > 512
            if last - first < rule.min_sentences or first == last or long:
                continue
            begin, length, wanted = first, 0, target()
            for sentence in range(first, last):
                length += lengths[sentence]
                remain, taken = last - sentence - 1, sentence + 1 - begin
                full = length >= wanted and remain > 1 and taken >= rule.min_sentences
                if full or remain == 0:
                    rows.append([begin, sentence + 1, wanted])
                    begin, length, wanted = sentence + 1, 0, target()
    order = list(range(len(rows)))
    twister = Twister64(rule.seed + 1)
    for place in range(len(rows) - 1, 0, -1):
        partner = int(twister.draw(1)[0]) % (place + 1)
        order[place], order[partner] = order[partner], order[place]
    return [rows[i] for i in order]


def corpus(seed: int, documents: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Empty documents, single sentences, long ones and empty ones among the others."""
    random = np.random.RandomState(seed)
    counts = random.choice([0, 1, 2, 3, 7, 40], documents)
    bounds = np.concatenate([[3], 3 + np.cumsum(counts)])
    lengths = random.choice(
        [0, 5, 20, 60, 512, 513], bounds[-1], p=[0.05, 0.4, 0.4, 0.1, 0.04, 0.01]
    )
    return lengths.astype(np.int32), bounds.astype(np.int64)


@pytest.mark.parametrize("name", ["mapping_bert", "mapping_t5", "mapping_bert_cap"])
def test_rows_are_those_of_megatron(golden: Path, name: str) -> None:
    vector = json.loads((golden / "megatron_vectors.json").read_text())[name]
    _, cap, length, short, seed, _, least = vector[GOLDEN_ARGUMENTS]
    rows = build_mapping(
        np.array(vector["sentence_lengths"], np.int32),
        np.array(vector["doc_bounds"], np.int64),
        MappingRule(int(length), float(short), int(seed), int(least)),
        None if int(cap) == UNLIMITED else int(cap),
    )
    assert rows.tolist() == vector["rows(first,last_exclusive,target_len)"]
    assert rows.dtype == np.uint32


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("short", [0.0, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("num_samples", [None, 900])
def test_rows_are_those_of_the_slow_walk(
    monkeypatch: pytest.MonkeyPatch, least: int, short: float, num_samples: int | None
) -> None:
    lengths, bounds = corpus(7, 120)
    rule = MappingRule(100, short, 5, least)
    wanted = slow_mapping(lengths.tolist(), bounds.tolist(), rule, num_samples)
    for block, draws in ((1 << 20, 1 << 16), (100, 37), (1, 8)):
        monkeypatch.setattr(mapping, "BLOCK_SENTENCES", block)
        monkeypatch.setattr(mapping, "DRAWS", draws)
        assert build_mapping(lengths, bounds, rule, num_samples).tolist() == wanted


def test_one_epoch_uses_every_sentence_of_usable_documents_once() -> None:
    lengths, bounds = corpus(1, 400)
    rows = build_mapping(lengths, bounds, MappingRule(128, 0.1, 1, 2))
    used = np.concatenate([np.arange(first, end) for first, end, _ in rows.tolist()])
    assert len(np.unique(used)) == len(used)
    longest = [max(lengths[a:b], default=0) for a, b in itertools.pairwise(bounds)]
    usable = (np.diff(bounds) >= 2) & (np.array(longest) <= 512)
    assert len(used) == np.diff(bounds)[usable].sum()
    assert (rows[:, 1] - rows[:, 0] >= 2).all()


def test_no_usable_document_is_an_error() -> None:
    bounds = np.array([0, 1, 1, 2])
    with pytest.raises(DataError, match="none of the 3 documents can be used"):
        build_mapping(np.array([5, 6], np.int32), bounds, MappingRule(100, 0.1, 1, 2), 10)


def test_the_twisters_are_those_of_the_standard() -> None:
    # The standard gives the 10,000th draw of each for the default seed.
    assert Twister32(5489).draw(10_000)[-1] == 4123659995
    assert Twister64(5489).draw(10_000)[-1] == 9981545732273789042


def test_draws_do_not_depend_on_how_many_are_taken_at_once() -> None:
    for kind in (Twister32, Twister64):
        pieces, whole = kind(9), kind(9).draw(1000)
        taken = [pieces.draw(count) for count in (1, 0, 155, 156, 157, 312, 219)]
        assert np.array_equal(np.concatenate(taken), whole)


def test_the_shuffled_order_is_a_permutation(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shuffled_order(1000, 3)
    assert sorted(whole.tolist()) == list(range(1000))
    monkeypatch.setattr(mapping, "SWAPS_AHEAD", 7)
    assert np.array_equal(shuffled_order(1000, 3), whole)
    assert shuffled_order(0, 3).tolist() == []


@pytest.mark.slow
def test_a_million_documents_take_a_step_a_row_and_not_a_sentence() -> None:
    random = np.random.RandomState(0)
    bounds = np.concatenate([[0], np.cumsum(random.poisson(20, 1_000_000))]).astype(np.int64)
    lengths = random.poisson(25, bounds[-1]).astype(np.int32)
    rows = build_mapping(lengths, bounds, MappingRule(509, 0.1, 1234, 2))
    assert 1_300_000 < len(rows) < 1_400_000
    head = slow_mapping(
        lengths[: bounds[20]].tolist(), bounds[:21].tolist(), MappingRule(509, 0.1, 1234, 2), None
    )
    whole = {tuple(row) for row in rows[rows[:, 1] <= bounds[20]].tolist()}
    assert whole == {tuple(row) for row in head}
