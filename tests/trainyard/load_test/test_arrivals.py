"""Arrival times and lengths: laws of their distributions; the search for a rate."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.config import MAX_SIZE
from trainyard.errors import ConfigError
from trainyard.load_test.arrivals import arrival_times, arrivals_within
from trainyard.load_test.lengths import parse_lengths
from trainyard.load_test.sweep import RateSearch


def generator(seed: int = 1) -> random.Random:
    return random.Random(seed)


def test_poisson_gaps_are_exponential_with_the_mean_of_the_rate() -> None:
    times = arrival_times("poisson", 20.0, 20_001, generator())
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)  # 4 deviations of the mean
    assert gaps.std() == pytest.approx(1 / 20, rel=0.05)
    # No gap knows of the last one.
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    assert times == arrival_times("poisson", 20.0, 20_001, generator())
    assert times != arrival_times("poisson", 20.0, 20_001, generator(2))


def test_counts_within_a_time_are_poisson() -> None:
    counts = [len(arrivals_within("poisson", 5.0, 4.0, generator(i))) for i in range(2000)]
    # One request is always at 0, the others are a Poisson process of mean 20.
    assert np.mean(counts) == pytest.approx(21, abs=0.4)
    assert np.var(counts) == pytest.approx(20, rel=0.15)


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert arrival_times("constant", 4.0, 4, generator()) == [0, 0.25, 0.5, 0.75]
    assert arrivals_within("constant", 4.0, 1.0, generator()) == [0, 0.25, 0.5, 0.75]
    assert arrival_times("constant", 4.0, 0, generator()) == []


@pytest.mark.parametrize(
    ("text", "mean", "std"),
    [
        ("128", 128, 0),
        ("fixed:7", 7, 0),
        ("uniform:10:30", 20, (21**2 / 12 - 1 / 12) ** 0.5),
        ("normal:500:50", 500, 50),
        ("lognormal:300:200", 300, 200),
    ],
)
def test_lengths_have_the_mean_and_deviation_of_their_distribution(
    text: str, mean: float, std: float
) -> None:
    lengths = parse_lengths(text, "--input-lengths").sample(20_000, generator())
    assert all(type(length) is int for length in lengths)
    assert np.mean(lengths) == pytest.approx(mean, rel=0.03)
    assert np.std(lengths) == pytest.approx(std, rel=0.08)
    if text == "uniform:10:30":
        assert set(lengths) == set(range(10, 31))


def test_no_length_is_below_one() -> None:
    lengths = parse_lengths("normal:1:50", "--input-lengths").sample(1000, generator())
    assert min(lengths) == 1
    assert max(parse_lengths(f"normal:{MAX_SIZE}:9", "").sample(50, generator())) <= MAX_SIZE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zipf:3", "is no distribution of lengths; write N, fixed:N"),
        ("uniform:3", "is no distribution"),
        ("0", "from 1 to"),
        ("normal:x:2", "from 1 to"),
        ("normal:5:-1", "from 1 to"),
        ("normal:nan:1", "from 1 to"),
        ("uniform:2.5:3", "whole numbers"),
        ("uniform:9:3", "the least length comes first"),
    ],
)
def test_wrong_lengths_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--input-lengths '{text}'.*{words}"):
        parse_lengths(text, "--input-lengths")


@settings(max_examples=30, deadline=None)
@given(limit=st.floats(0.05, 500), first=st.floats(0.1, 100))
def test_a_sweep_finds_the_rate_at_which_a_server_gives_out(limit: float, first: float) -> None:
    search, probes = RateSearch(first, 40, tolerance=0.05), 0
    while (rate := search.next_rate()) is not None:
        probes += 1
        search.record(rate, rate <= limit)
    assert search.is_narrow
    assert search.best is not None
    assert search.failed is not None
    assert search.best <= limit < search.failed
    assert search.failed - search.best <= 0.05 * search.failed
    # Doublings or halvings to the limit, and five bisections of a factor of two.
    assert probes <= abs(np.log2(limit / first)) + 2 + 5


def test_a_sweep_ends_after_its_measurements() -> None:
    search = RateSearch(1.0, 3)
    for expected in (1.0, 2.0, 4.0):
        assert search.next_rate() == expected
        search.record(expected, met=True)
    assert search.next_rate() is None
    assert (search.best, search.failed, search.is_narrow) == (4.0, None, False)
    search = RateSearch(1.0, 2)
    for expected in (1.0, 0.5):
        assert search.next_rate() == expected
        search.record(expected, met=False)
    assert search.next_rate() is None
    assert search.best is None
