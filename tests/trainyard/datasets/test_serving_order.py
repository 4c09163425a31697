"""When a sample is served, against the loader of every rank and torch's own permutation."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from trainyard.datasets.config import DataConfig
from trainyard.datasets.loader import sample_blocks
from trainyard.datasets.sampler import SamplerShape
from trainyard.datasets.serving_order import CHUNK, Place, Serving, torch_permutation
from trainyard.errors import ConfigError

SHAPES = [SamplerShape(50, 2, 3), SamplerShape(24, 1, 1), SamplerShape(31, 3, 2)]


@pytest.mark.parametrize("kind", ["single", "cyclic", "cyclic unsharded"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_is_what_the_loader_of_each_rank_serves(shape: SamplerShape, kind: str) -> None:
    data = DataConfig(
        data_path=("x",),
        dataloader_type="cyclic" if kind.startswith("cyclic") else "single",
        data_sharding=kind != "cyclic unsharded",
    )
    size = 2 * shape.per_step
    serving = Serving(shape, size, data.dataloader_type, data.data_sharding)
    steps = shape.num_samples // size if kind == "single" else 9
    served: dict[int, list[Place]] = {}
    for step in range(1, steps + 1):
        groups = chain.from_iterable(sample_blocks(data, shape, (step - 1) * size))
        expected = np.stack([next(groups), next(groups)])  # (micro-batch, rank, row)
        assert serving.step(step).tolist() == expected.ravel().tolist()
        for (micro_batch, rank, row), sample in np.ndenumerate(expected):
            served.setdefault(int(sample), []).append(Place(step, micro_batch, rank, row))
    for t in range(steps * size):
        (sample,) = serving.samples(t, 1).tolist()
        assert serving.place(t) in served[sample]
    samples = np.arange(shape.num_samples)
    places = serving.places(samples, steps)
    assert {sample: found for sample, found in places.items() if found} == served
    counts = serving.counts(samples, steps).tolist()
    assert counts == [len(served.get(sample, [])) for sample in samples.tolist()]


def test_a_run_that_ends_before_its_samples_leaves_them_unserved() -> None:
    serving = Serving(SamplerShape(50, 2, 2), 8)
    assert serving.places(np.array([3, 39, 40, 49]), 5) == {
        3: [Place(1, 0, 1, 1)],
        39: [Place(5, 1, 1, 1)],
        40: [],
        49: [],
    }
    assert serving.step(12).tolist() == list(range(88, 88))  # beyond the order: nothing
    with pytest.raises(ConfigError, match="--global-batch-size"):
        Serving(SamplerShape(50, 2, 2), 6)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 10, 1000, 33_333])
def test_the_permutation_without_torch_is_torchs(n: int) -> None:
    for epoch in (0, 1, 12_345, 2**32 + 1):
        generator = torch.Generator()
        generator.manual_seed(epoch)
        expected = torch.randperm(n, generator=generator).tolist()
        assert torch_permutation(epoch, n).tolist() == expected


def test_a_permutation_drawn_in_chunks_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch_permutation(5, 2000)
    assert CHUNK > 2000
    for chunk in (1, 7, 1999, 2000):
        monkeypatch.setattr("trainyard.datasets.serving_order.CHUNK", chunk)
        assert np.array_equal(torch_permutation(5, 2000), whole)


def test_a_cyclic_order_too_long_to_follow_is_refused() -> None:
    with pytest.raises(ConfigError, match="--dataloader-type cyclic"):
        Serving(SamplerShape(2**32, 1, 1), 1, "cyclic")
