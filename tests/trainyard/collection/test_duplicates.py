"""MinHash estimates the Jaccard index; groups in files are groups in memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from trainyard.collection.duplicates.clusters import Union
from trainyard.collection.duplicates.fingerprints import Fingerprints
from trainyard.collection.duplicates.minhash import (
    MinHash,
    Shingler,
    normalized,
    one_blank,
    similarity,
)
from trainyard.collection.duplicates.spill import Spill
from trainyard.errors import ArtifactError


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_equal_numbers_of_signatures_estimate_the_jaccard_index(share: float) -> None:
    """Of 2000 permutations the share of equal minima has a deviation of at most 0.012."""
    rng = np.random.default_rng(0)
    all_of_both = np.unique(rng.integers(0, 1 << 32, 1500, np.uint64).astype(np.uint32))
    common = round(share * len(all_of_both))
    half = (len(all_of_both) - common) // 2
    order = rng.permutation(all_of_both)
    one, other = order[: common + half], np.concatenate([order[:common], order[common + half :]])
    minhash = MinHash.of(2000, 20, seed=1)
    equal = minhash.signature(one) == minhash.signature(other)
    measured = similarity("union")(np.sort(one), np.sort(other))
    assert measured == pytest.approx(share, abs=1e-3)
    assert equal.mean() == pytest.approx(measured, abs=4 * 0.012)


def test_a_band_key_is_equal_where_its_rows_are() -> None:
    rng = np.random.default_rng(0)
    signatures = rng.integers(0, 3, (60, 6)).astype(np.uint32)
    keys = MinHash.of(6, 3, seed=0).band_keys(signatures)
    rows = signatures.reshape(60, 3, 2)
    for band in range(3):
        same_rows = (rows[:, None, band] == rows[None, :, band]).all(axis=2)
        assert np.array_equal(keys[:, None, band] == keys[None, :, band], same_rows)
    assert not set(keys[:, 0].tolist()) & set(keys[:, 1].tolist())  # nor equal across bands


def test_shingles_are_a_set_and_know_their_order() -> None:
    words = Shingler("words", 2)
    assert len(words("a b a b a")) == 2
    assert set(words("a b c").tolist()) & set(words("b c d").tolist())
    assert not set(words("a b").tolist()) & set(words("b a").tolist())
    chars = Shingler("chars", 5)
    assert len(chars("abcdefg")) == 3
    assert np.array_equal(chars("\U0001f600bcdefg")[:0], chars(""))
    assert len(chars("abc")) == 1


def test_similarities_by_the_names_of_upstream() -> None:
    one, other = (np.array(x, np.uint32) for x in ([1, 2, 3, 4], [3, 4, 5, 6, 7, 8]))
    assert similarity("union")(one, other) == 2 / 8
    assert similarity("min")(one, other) == 2 / 4
    assert similarity("max")(one, other) == 2 / 6


def test_normal_forms_of_texts() -> None:
    assert normalized("The  Yard,\nat DAWN!") == "the yard at dawn"


@pytest.mark.parametrize(
    "words",
    [
        ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u092e\u0947\u0902"],  # Hindi, vowel signs
        ["\u0ba4\u0bae\u0bbf\u0bb4\u0bcd", "\u0bae\u0bca\u0bb4\u0bbf"],  # Tamil
        ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\u0645\u0646"],  # Persian, a joiner
        ["e\u0301t\u0301e\u0301", "c\u0327a"],  # decomposed accents
    ],
)
def test_a_word_of_any_script_stays_whole(words: list[str]) -> None:
    assert normalized(f"{words[0]}, {words[1]}!").split() == words
    assert one_blank(" The  Yard,\n at") == "The Yard, at"


@pytest.mark.parametrize("expected_rows", [1, 10**8])
def test_groups_in_files_are_groups_in_memory(
    tmp_path: Path, expected_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.collection.duplicates.spill.PARTITION_BYTES", 1 << 10)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 300, (1000, 3)).astype(np.uint64)
    rows[:, 2] = np.arange(1000)
    spill = Spill(tmp_path / "spill", 3, 2, expected_rows)
    for part in np.array_split(rows, 7):
        spill.add(part)
    found = []
    for group, bounds in spill.groups():
        found += [group[a:b, 2].tolist() for a, b in pairwise(bounds)]
    expected: dict[tuple[int, int], list[int]] = {}
    for a, b, number in rows.tolist():
        expected.setdefault((a, b), []).append(number)
    assert sorted(found) == sorted(v for v in expected.values() if len(v) > 1)


def test_union_of_chains() -> None:
    union = Union()
    for a, b in ((5, 4), (9, 8), (4, 9), (1, 2)):
        union.unite(a, b)
    assert sorted(union.sets()) == [[1, 2], [4, 5, 8, 9]]
    assert union.find(7) == 7


def test_a_damaged_file_of_fingerprints_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"f\.npz: not a file of fingerprints"):
        Fingerprints.parse(b"PK\x03\x04 nothing", "f.npz")
