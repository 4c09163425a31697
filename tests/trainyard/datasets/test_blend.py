"""The blend against Megatron-LM's own indices and against the rule written out."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.vectors import GOLDEN
from trainyard.datasets import blend as blends
from trainyard.datasets.blend import blend, blend_exhaustive, normalise
from trainyard.errors import ConfigError


def greedy(weights: list[float], limits: list[float], num_samples: int) -> list[int]:
    """The rule, one sample at a time."""
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    counts = [0] * len(shares)
    chosen = []
    for i in range(num_samples):
        lags = [
            float(w) * float(max(i, 1)) - float(c) if c < limit else -np.inf
            for w, c, limit in zip(shares, counts, limits, strict=True)
        ]
        best = lags.index(max(lags))
        counts[best] += 1
        chosen.append(best)
    return chosen


def test_blend_equals_megatrons() -> None:
    golden = json.loads((GOLDEN / "megatron_vectors.json").read_text())
    case = golden["blend"]
    index, sample = blend(case["weights"], case["size"])
    assert index.tolist() == case["dataset_index"]
    assert sample.tolist() == case["dataset_sample_index"]
    case = golden["blend_exhaustive"]
    index, sample = blend_exhaustive(case["sizes"])
    assert index.tolist() == case["dataset_index"]
    assert sample.tolist() == case["dataset_sample_index"]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "weights",
    [
        [1.0],
        [0.5, 0.5],
        [1.0, 1.0, 1.0],
        [0.7, 0.2, 0.1],
        [0.6, 0.0, 0.4],
        [0.999, 0.001],
        [1e-9, 1.0],
        [1 / 3, 1 / 7, 1 / 11, 1 / 13],
        [0.2] * 5,
        [0.1, 0.0, 0.3, 0.3, 0.0, 0.3],
        [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0],
        list(np.random.default_rng(0).random(40)),
    ],
)
@pytest.mark.parametrize("few_cells", [0, 10**9], ids=["numba", "Python"])
def test_few_datasets_equal_one_sample_at_a_time(
    weights: list[float], few_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blends, "FEW_CELLS", few_cells)
    index, sample = blend(weights, 5000)
    expected = greedy(weights, [np.inf] * len(weights), 5000)
    assert index.tolist() == expected
    assert sample.tolist() == [expected[:i].count(d) for i, d in enumerate(expected)]


@pytest.mark.parametrize("few_cells", [0, 10**9], ids=["numba", "Python"])
@pytest.mark.parametrize(
    "sizes",
    [[4000], [3000, 1], [1, 3000], [1500, 900, 700, 33], [0, 2000], [7, 0, 900, 900, 1, 31]],
)
def test_exhaustive_equals_one_sample_at_a_time(
    sizes: list[int], few_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blends, "FEW_CELLS", few_cells)
    index, _ = blend_exhaustive(sizes)
    assert index.tolist() == greedy(
        [float(s) for s in sizes], [float(s) for s in sizes], sum(sizes)
    )
    assert np.bincount(index, minlength=len(sizes)).tolist() == sizes


@pytest.mark.parametrize("few_cells", [0, 10**9], ids=["numba", "Python"])
@pytest.mark.parametrize("num_datasets", [3, 6, 7, 50])
def test_pieces_are_those_of_the_whole(
    num_datasets: int, few_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blends, "FEW_CELLS", few_cells)
    sizes = np.random.default_rng(7).integers(0, 60, num_datasets).tolist()
    weights, count = [size + 0.5 for size in sizes], sum(sizes)
    expected = [blend(weights, count), blend_exhaustive(sizes)]
    monkeypatch.setattr(blends, "PIECE", 13)
    made = [blends.blend_pieces(weights, count), blends.exhaustive_pieces(sizes)]
    for each, one in zip(made, expected, strict=True):
        pieces = list(each)
        assert {len(chosen) for chosen, _ in pieces[:-1]} == {13}
        assert all(map(np.array_equal, map(np.concatenate, zip(*pieces, strict=True)), one))


def greedy_arrays(shares: NDArray[np.float64], num_samples: int) -> list[int]:
    """`greedy` without limits, in numpy."""
    counts, chosen = np.zeros(len(shares)), []
    for i in range(num_samples):
        best = int((shares * float(max(i, 1)) - counts).argmax())
        counts[best] += 1
        chosen.append(best)
    return chosen


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("kind", ["equal", "uniform", "heavy tail", "nearly equal", "mostly 0"])
@pytest.mark.parametrize("num_datasets", [320, 41, 100, 1000])
def test_looking_at_few_of_many_datasets_changes_nothing(num_datasets: int, kind: str) -> None:
    random = np.random.default_rng(5)
    drawn = {
        "equal": np.ones(num_datasets),
        "uniform": random.random(num_datasets),
        "heavy tail": random.pareto(1, num_datasets),
        "nearly equal": 1 + 1e-9 * random.random(num_datasets),
        "mostly 0": random.random(num_datasets) * (random.random(num_datasets) < 0.1),
    }
    index, sample = blend(drawn[kind].tolist(), 20_000)
    assert index.tolist() == greedy_arrays(normalise(drawn[kind].tolist()), 20_000)
    for number in range(num_datasets):
        served = sample[index == number]
        assert served.tolist() == list(range(len(served)))


@pytest.mark.slow
def test_a_blend_needs_no_folder_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = blend([0.2, 0.3, 0.5], 200_000)
    monkeypatch.setenv("NUMBA_CACHE_DIR", os.devnull)
    blends._compiled_walk_six.cache_clear()
    assert all(map(np.array_equal, blend([0.2, 0.3, 0.5], 200_000), expected))
    blends._compiled_walk_six.cache_clear()


@pytest.mark.parametrize(("num_datasets", "largest"), [(140, 9), (320, 5)])
def test_many_exhausted_datasets_equal_one_sample_at_a_time(
    num_datasets: int, largest: int
) -> None:
    sizes = np.random.default_rng(6).integers(0, largest + 1, num_datasets).tolist()
    index, _ = blend_exhaustive(sizes)
    limits = [float(size) for size in sizes]
    assert index.tolist() == greedy(limits, limits, sum(sizes))


def test_invalid_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="data-path weights"):
        blend([0.0, 0.0], 10)
