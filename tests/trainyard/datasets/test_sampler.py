"""Every sample goes to exactly one place, for a run cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
import pytest
import torch

from trainyard.datasets import sampler
from trainyard.datasets.config import DataConfig
from trainyard.datasets.gpt import Sample
from trainyard.datasets.loader import Batch, build_loader, sample_blocks, torch_permutation
from trainyard.datasets.sampler import SamplerShape, cyclic, single
from trainyard.errors import ConfigError


def test_single_serves_in_order_and_drops_a_partial_group() -> None:
    blocks = [block.tolist() for block in single(SamplerShape(11, 2, 2), 0)]
    assert blocks == [[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]]


def test_single_serves_blocks_of_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SamplerShape(31, 2, 2)
    (whole,) = single(shape, 4)
    monkeypatch.setattr(sampler, "BLOCK", 11)
    blocks = [*single(shape, 4)]
    assert [len(block) for block in blocks] == [2, 2, 2]
    assert np.array_equal(np.concatenate(blocks), whole)


def test_single_does_not_depend_on_the_number_of_ranks() -> None:
    (one,), (four,) = ([b.ravel() for b in single(SamplerShape(64, 4, dp), 8)] for dp in (1, 4))
    assert one[: len(four)].tolist() == four.tolist()


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("sharding", [True, False])
def test_a_restart_continues_where_the_run_was_cut(kind: str, sharding: bool) -> None:
    data = DataConfig(data_path=("x",), dataloader_type=kind, data_sharding=sharding)  # type: ignore[arg-type]
    shape = SamplerShape(50, 3, 2)
    whole, cut = (chain.from_iterable(sample_blocks(data, shape, done)) for done in (0, 30))
    assert [g.tolist() for g in islice(cut, 3)] == [g.tolist() for g in islice(whole, 5, 8)]


@pytest.mark.parametrize("sharding", [True, False])
def test_cyclic_serves_every_sample_of_an_epoch_once(sharding: bool) -> None:
    shape = SamplerShape(48, 4, 2)
    blocks = cyclic(shape, 0, torch_permutation, sharding)
    epochs = np.concatenate([block.ravel() for block in islice(blocks, 2)])
    assert sorted(epochs[:48]) == list(range(48))
    assert sorted(epochs[48:]) == list(range(48))
    assert epochs[:48].tolist() != epochs[48:].tolist()


def test_a_shuffled_epoch_goes_on_with_a_whole_micro_batch_of_every_rank() -> None:
    data = DataConfig(data_path=("x",), dataloader_type="cyclic")
    shape = SamplerShape(21, 2, 2)  # 20 an epoch
    with pytest.raises(ConfigError, match=r"cyclic: 6 samples .* no multiple of --micro-"):
        sample_blocks(data, shape, 26)
    assert next(sample_blocks(data, shape, 28)).shape == (3, 2, 2)


def test_cyclic_shards_are_megatrons() -> None:
    shape = SamplerShape(21, 2, 2)  # 5 groups of 4; each rank owns 10
    generator = torch.Generator()
    generator.manual_seed(0)
    order = torch.randperm(10, generator=generator)
    first = next(cyclic(shape, 0, torch_permutation))[0]
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


# --- batches ----------------------------------------------------------------------------------


class Batching(Numbers):
    """Serves whole batches, and counts them."""

    def __init__(self) -> None:
        self.batches_asked: list[list[int]] = []
        self.shared = np.broadcast_to(np.float32(1), (64, 2))

    def __getitems__(self, indices: list[int]) -> Sample:
        self.batches_asked.append(indices)
        tokens = np.array([[i, i] for i in indices])
        return {"tokens": tokens, "loss_mask": self.shared[: len(indices)]}


def test_a_dataset_that_serves_batches_is_asked_for_them() -> None:
    data = DataConfig(data_path=("x",))
    dataset = Batching()
    loader = build_loader(dataset, data, SamplerShape(32, 2, 2), consumed=24, dp_rank=1)
    first, second = loader
    assert dataset.batches_asked == [[26, 27], [30, 31]]
    assert second["tokens"].tolist() == [[30, 30], [31, 31]]
    first["loss_mask"][:] = 0.0  # a batch is the trainer's own
    assert second["loss_mask"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


class Streaming:
    """Loads itself."""

    def __len__(self) -> int:
        return 1000

    def batches(self, shape: SamplerShape, consumed: int, dp_rank: int) -> Iterator[Batch]:
        while True:
            yield {"tokens": torch.tensor([[consumed, dp_rank]] * shape.micro_batch_size)}
            consumed += shape.per_step


def test_an_external_loader_is_asked_for_its_batches() -> None:
    data = DataConfig(data_path=("x",), dataloader_type="external")
    shape = SamplerShape(1000, 2, 4)
    batches = build_loader(Streaming(), data, shape, consumed=16, dp_rank=3)
    found = [batch["tokens"].tolist() for batch in islice(batches, 2)]
    assert found == [[[16, 3], [16, 3]], [[24, 3], [24, 3]]]


def test_token_files_have_no_external_order() -> None:
    data = DataConfig(data_path=("x",), dataloader_type="external")
    shape = SamplerShape(32, 2, 2)
    with pytest.raises(ConfigError, match="--dataloader-type external"):
        build_loader(Numbers(), data, shape, 0, 0)
    with pytest.raises(ConfigError, match="--dataloader-type external"):
        sample_blocks(data, shape, 0)
