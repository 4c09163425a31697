"""Work of a training's ranks does not grow with their number, or in proportion: calls are counted
at two sizes. For times and memory: `benchmarks.growth`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import growth_load
from tests.counts import LINEAR, TIMES, calls, grow
from trainyard.checkpoint.node_local.visibility import firsts_of
from trainyard.checkpoint.plan import Slice, plan_files, plan_shards
from trainyard.datasets.blended import Blended
from trainyard.datasets.config import DataConfig
from trainyard.datasets.sample_format import spelled_out
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import ProcessGroups
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.data import RunData
from trainyard.training.loop.ledger import digest_samples
from trainyard.training.loop.sample_check import ConsumedSamples, SampleCheck
from trainyard.training.loop.seeds import microbatch_seed


def test_rank_0_digests_a_larger_batch_in_as_many_calls() -> None:
    """Numpy's calls are over all samples, and no loop of Python's is."""
    datasets, counts = 20, []
    for dp in (8, 8 * TIMES):
        samples = np.arange(4 * dp)
        sources: Any = [Numbered()] * datasets
        chosen = (samples % datasets).astype(np.int16)
        blended = Blended(sources, chosen, samples // datasets)
        size, groups = BatchSize(len(samples), 1, dp), ProcessGroups(ParallelDims(dp=dp), 0)
        data = RunData(DataConfig(data_path=("none",)), blended, (), size, 0)
        check = SampleCheck(1, size, 7, groups, data.expected_samples(0))
        taken = ConsumedSamples(1, size.num_microbatches)
        for micro, own in enumerate(samples[::dp]):
            taken.ids.append(blended.ids(np.array([own])))
            taken.seeds[0, micro] = (microbatch_seed(7, 1, micro * dp),)
        counts.append(calls(partial(check.check, taken)))
        assert check.samples == digest_samples(blended.ids(samples))
    assert counts[0] == counts[1]


class Numbered:
    """A source whose samples are numbered as they come."""

    def numbers(self, indices: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        return spelled_out(indices)


def slices(count: int) -> list[Slice]:
    shapes = [(8 + number % 7, 4) for number in range(count)]
    return [Slice(f"model.{n:03d}", "F32", shape, (0, 0), shape) for n, shape in enumerate(shapes)]


def test_a_plan_of_more_files_looks_at_no_more_of_them() -> None:
    def counted(num_files: int) -> int:
        return calls(lambda: plan_shards("model", slices(400), num_files))

    assert grow(counted, 20) <= 1.5


@pytest.mark.parametrize("num_shards", [1, 3, 10, 12, 50])
def test_a_plan_of_files_is_that_of_writers_that_hold_all_slices(num_shards: int) -> None:
    every = slices(12)
    held = [list(every)] * num_shards
    assert plan_shards("model", every, num_shards) == plan_files("model", held, sys.maxsize)


def test_a_rank_that_loads_from_nodes_plans_no_more_with_more_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth_load, "MATRICES", 20)

    def counted(num_ranks: int) -> int:
        return calls(growth_load.load_local(num_ranks, tmp_path))

    assert grow(counted, 64) <= 1.2


def test_ranks_that_see_one_folder_find_it_without_a_look_at_each_pair() -> None:
    def counted(num_ranks: int) -> int:
        return calls(lambda: firsts_of([((0, num_ranks),)] * num_ranks))

    assert grow(counted, 100) <= LINEAR
