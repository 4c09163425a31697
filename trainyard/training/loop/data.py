"""The datasets of a run as streams of micro-batches from any position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from trainyard.datasets.build import build_datasets
from trainyard.datasets.config import DataConfig
from trainyard.datasets.index_cache import IN_MEMORY, IndexCache
from trainyard.datasets.loader import Batch, ExternalData, build_loader, load, sample_blocks
from trainyard.datasets.sample_format import Dataset
from trainyard.datasets.sampler import SamplerShape, WholeShare
from trainyard.errors import ConfigError
from trainyard.models.families import family_of
from trainyard.models.family import SampleOptions
from trainyard.parallel.data_config import FULLY_SHARDED, STRATEGY
from trainyard.parallel.pipeline.runner import FULL
from trainyard.retrieval.shape import NeighborShape
from trainyard.tokenizers.base import Tokenizer
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.length import RunLength, num_samples
from trainyard.training.loop.sample_check import ExpectedSamples
from trainyard.training.options.pretrain import PretrainConfig


class Measurement(NamedTuple):
    """One rank's part of a validation or test set."""

    name: str
    batches: Iterator[Batch]
    num_microbatches: int
    """How many of the batches to use."""
    last_filled: Fraction = FULL
    """The share of its samples that the last of them has."""


@dataclass(frozen=True, slots=True)
class RunData:
    """Training, validation and test data of one rank."""

    config: DataConfig
    train: Dataset | ExternalData
    valid: tuple[tuple[str, Dataset], ...]
    """Validation sets by name."""
    batch_size: BatchSize
    """The final global batch size, for validation. Micro-batch size and dp are those of every
    step."""
    dp_rank: int = 0
    test: tuple[tuple[str, Dataset], ...] = ()
    """Test sets by name; used once, at the end of the run."""
    untested: str = ""
    """Why there is no test data, although --split asks for it."""

    def train_batches(self, consumed: int) -> Iterator[Batch]:
        """This rank's micro-batches after `consumed` samples of all ranks, with their sample
        ids."""
        shape = self._shape(self.train)
        return build_loader(self.train, self.config, shape, consumed, self.dp_rank, named=True)

    def validations(self, number: int, eval_iters: int) -> Iterator[Measurement]:
        """For each validation set, this rank's part of validation `number`, counted from 0: the
        samples after those of earlier validations, or the whole set."""
        for name, dataset in self.valid:
            if self.config.full_validation:
                yield self._whole(name, dataset)
            else:
                yield self._part(name, dataset, number, eval_iters)

    def tests(self, eval_iters: int) -> Iterator[Measurement]:
        """For each test set its first samples, or the whole set if it has fewer; also with
        --full-validation, as in Megatron-LM."""
        wanted = eval_iters * self.batch_size.global_batch_size
        for name, dataset in self.test:
            if len(dataset) < wanted:
                yield self._whole(name, dataset)
            else:
                yield self._part(name, dataset, 0, eval_iters)

    def whole_sets(self, eval_iters: int) -> Iterator[tuple[str, Dataset]]:
        """The sets that are measured whole, each with what it is."""
        if self.config.full_validation:
            yield from ((f"validation set {name!r}", one) for name, one in self.valid)
        wanted = eval_iters * self.batch_size.global_batch_size
        yield from ((f"test set {name!r}", one) for name, one in self.test if len(one) < wanted)

    def _whole(self, name: str, dataset: Dataset) -> Measurement:
        size = self.batch_size
        share = WholeShare(len(dataset), size.micro_batch_size, size.dp, self.dp_rank)
        last = Fraction(len(share[-1]), size.micro_batch_size) if share else FULL
        return Measurement(name, load(dataset, self.config, share), len(share), last)

    def _part(self, name: str, dataset: Dataset, number: int, eval_iters: int) -> Measurement:
        size = self.batch_size
        consumed = number * eval_iters * size.global_batch_size
        batches = build_loader(dataset, self.config, self._shape(dataset), consumed, self.dp_rank)
        return Measurement(name, batches, eval_iters * size.num_microbatches)

    def expected_samples(self, consumed: int) -> ExpectedSamples | None:
        """The samples of each step after `consumed` samples of all ranks, independent of the
        loader; None for data that loads itself."""
        train = self.train
        if isinstance(train, ExternalData):
            return None
        return ExpectedSamples(sample_blocks(self.config, self._shape(train), consumed), train.ids)

    def _shape(self, dataset: Dataset | ExternalData) -> SamplerShape:
        return SamplerShape(len(dataset), self.batch_size.micro_batch_size, self.batch_size.dp)


def build_run_data(
    config: PretrainConfig, tokenizer: Tokenizer, length: RunLength, dp_rank: int = 0
) -> RunData:
    """The datasets of a run, large enough for all its steps and validations.

    Every rank calls it. With --data-cache-path one rank of a machine builds missing indices, and
    the others wait for them."""
    data, training = config.data, config.training
    options = SampleOptions(
        data=data,
        masked=config.masked,
        fim=config.fim,
        sft=config.sft,
        tokenizer=tokenizer,
        seed=training.seed,
    )
    family = family_of(config.model)
    sample_format = family.build_format(config.model, options)
    sizes = num_samples(training, length)
    indexer = IN_MEMORY if data.data_cache_path is None else IndexCache(data.data_cache_path)
    built = build_datasets(data, sample_format, sizes, indexer, length.consumed)
    assert built.train is not None
    final = length.batch_size_schedule.final
    found = RunData(data, built.train, built.valid, final, dp_rank, built.test, built.untested)
    if family.neighbor_shape is None or config.sft.sft:
        return found
    shape = family.neighbor_shape(config.model)
    return _with_neighbors(found, config, shape, sizes, length.consumed)


def check_whole_sets(config: PretrainConfig, data: RunData) -> None:
    """ConfigError for a set that is measured whole and gives replicas unequal passes, where their
    forward passes wait for each other: those that share experts or weights."""
    parallel, size = config.parallel, data.batch_size
    if size.dp == 1:
        return
    shares_experts = parallel.expert_model_parallel_size > 1
    if shares_experts:
        shared = f"experts (--expert-model-parallel-size {parallel.expert_model_parallel_size})"
    elif parallel.data_parallel.sharding in FULLY_SHARDED:
        shared = f"weights ({STRATEGY} {parallel.data_parallel.sharding})"
    else:
        return
    for name, dataset in data.whole_sets(config.training.eval_iters):
        full, rest = divmod(len(dataset), size.micro_batch_size)
        # One that is not full passes a pipeline alone, and experts want rows alike on every rank.
        is_uneven = rest and (parallel.pipeline_model_parallel_size > 1 or shares_experts)
        if is_uneven or (full + bool(rest)) % size.dp:
            raise ConfigError(
                f"{name} is measured whole, and its {len(dataset):,} samples are no multiple of "
                f"--micro-batch-size {size.micro_batch_size} x {size.dp} data-parallel ranks: "
                f"ranks that share {shared} must compute the same micro-batches. Leave "
                "--full-validation out, lower --eval-iters, or choose a --micro-batch-size that "
                "fits"
            )


def _with_neighbors(
    data: RunData,
    config: PretrainConfig,
    shape: NeighborShape,
    sizes: tuple[int, int, int],
    consumed: int,
) -> RunData:
    """The same data, each sample with the neighbours of its chunks."""
    # Imported here: other families do without HDF5.
    from trainyard.retrieval.run_neighbors import RunNeighbors

    opened = RunNeighbors.open(config.retrieval, config.data, shape)
    assert not isinstance(data.train, ExternalData)
    test, untested = data.test, data.untested
    if test and not opened.has("test"):
        test, untested = (), "there are no neighbours of the test samples (--retro-test-neighbors)"
    return replace(
        data,
        train=opened.join("train", data.train, max(sizes[0], consumed)),
        valid=tuple((name, opened.join("valid", one, sizes[1])) for name, one in data.valid),
        test=tuple((name, opened.join("test", one, sizes[2])) for name, one in test),
        untested=untested,
    )
