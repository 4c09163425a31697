"""Every sample goes to exactly one place, wherever a run was cut."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from trainyard.datasets.config import DataConfig
from trainyard.datasets.gpt import Sample
from trainyard.datasets.loader import build_loader, sample_groups, torch_permutation
from trainyard.datasets.sampler import SamplerShape, cyclic, single
from trainyard.errors import ConfigError


def test_single_serves_in_order_and_drops_a_partial_group() -> None:
    groups = [g.tolist() for g in single(SamplerShape(11, 2, 2), 0)]
    assert groups == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_single_does_not_depend_on_the_number_of_ranks() -> None:
    one = np.concatenate([g.ravel() for g in single(SamplerShape(64, 4, 1), 8)])
    four = np.concatenate([g.ravel() for g in single(SamplerShape(64, 4, 4), 8)])
    assert one[: len(four)].tolist() == four.tolist()


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("sharding", [True, False])
def test_a_restart_continues_where_the_run_was_cut(kind: str, sharding: bool) -> None:
    data = DataConfig(data_path=("x",), dataloader_type=kind, data_sharding=sharding)  # type: ignore[arg-type]
    shape = SamplerShape(50, 3, 2)
    whole = [g.tolist() for g in islice(sample_groups(data, shape, 0), 8)]
    cut = [g.tolist() for g in islice(sample_groups(data, shape, 30), 3)]
    assert cut == whole[5:8]


@pytest.mark.parametrize("sharding", [True, False])
def test_cyclic_serves_every_sample_of_an_epoch_once(sharding: bool) -> None:
    shape = SamplerShape(48, 4, 2)
    epochs = np.concatenate(
        [g.ravel() for g in islice(cyclic(shape, 0, torch_permutation, sharding), 12)]
    )
    assert sorted(epochs[:48]) == list(range(48))
    assert sorted(epochs[48:]) == list(range(48))
    assert epochs[:48].tolist() != epochs[48:].tolist()


def test_cyclic_shards_are_megatrons() -> None:
    shape = SamplerShape(21, 2, 2)  # 5 groups of 4; each rank owns 10
    generator = torch.Generator()
    generator.manual_seed(0)
    order = torch.randperm(10, generator=generator)
    first = next(cyclic(shape, 0, torch_permutation))
    assert first.tolist() == [order[:2].tolist(), (order[:2] + 10).tolist()]


def test_too_little_data_for_one_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="micro-batch-size 4 on each of 2"):
        SamplerShape(7, 4, 2)


class Numbers:
    """A dataset of its own indices."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Sample:
        return {"tokens": np.array([index, index])}

    def ids(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([indices, indices], axis=1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_loads_its_row_of_each_group(num_workers: int) -> None:
    data = DataConfig(data_path=("x",), num_workers=num_workers)
    loader = build_loader(Numbers(), data, SamplerShape(32, 2, 2), consumed=8, dp_rank=1)
    rows = [batch["tokens"][:, 0].tolist() for batch in loader]
    assert rows == [[10, 11], [14, 15], [18, 19], [22, 23], [26, 27], [30, 31]]
