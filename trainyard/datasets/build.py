"""The training, validation and test data of a run, from what a person said about them."""

from __future__ import annotations

import logging
import math

import numpy as np
from numpy.typing import NDArray

from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.blend import blend, blend_exhaustive, normalise
from trainyard.datasets.config import DataConfig, Source
from trainyard.datasets.gpt import BlendedDataset, Dataset, GPTDataset, SampleFormat
from trainyard.errors import ConfigError

log = logging.getLogger(__name__)


def build_gpt_datasets(
    data: DataConfig, form: SampleFormat, sizes: tuple[int, int, int]
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Training, validation and test data of at least the given numbers of samples; None for 0.

    Raises ConfigError when a split that is wanted has no documents or too few tokens."""
    opened: dict[str, IndexedDataset] = {}

    def build(split: str, size: int) -> Dataset | None:
        return _build_split(data, form, split, size, opened) if size else None

    return build("train", sizes[0]), build("valid", sizes[1]), build("test", sizes[2])


def _build_split(
    data: DataConfig, form: SampleFormat, split: str, size: int, opened: dict[str, IndexedDataset]
) -> Dataset:
    sources = data.sources(split)
    if not sources:
        raise ConfigError(
            f"--{split}-data-path is not given, but {size} {split} samples are wanted; "
            "give it, or set --eval-iters 0"
        )
    for source in sources:
        if source.prefix not in opened:
            opened[source.prefix] = IndexedDataset(source.prefix)
    if len(sources) == 1 and sources[0].weight is None:
        return _build_source(data, form, split, size, opened[sources[0].prefix])
    if sources[0].weight is None:
        return _blend_by_size(data, form, split, size, [opened[s.prefix] for s in sources])
    return _blend_by_weight(data, form, split, size, sources, opened)


def _blend_by_size(
    data: DataConfig, form: SampleFormat, split: str, size: int, files: list[IndexedDataset]
) -> Dataset:
    """No weights: one epoch of each, in proportion to what it holds."""
    datasets = [_build_source(data, form, split, None, file) for file in files]
    sizes = [len(dataset) for dataset in datasets]
    if size > sum(sizes):
        raise ConfigError(
            f"--data-path without weights is one epoch, {sum(sizes)} {split} samples, and {size} "
            "are wanted; give weights, or train for less"
        )
    if size == sum(sizes):
        return BlendedDataset(datasets, *blend_exhaustive(sizes))
    return BlendedDataset(datasets, *blend([float(n) for n in sizes], size))


def _blend_by_weight(
    data: DataConfig,
    form: SampleFormat,
    split: str,
    size: int,
    sources: list[Source],
    opened: dict[str, IndexedDataset],
) -> Dataset:
    weights = normalise([source.weight or 0.0 for source in sources]).tolist()
    index, sample = blend(weights, size)
    surplus = 1 + data.mid_level_dataset_surplus
    datasets = []
    for source, weight in zip(sources, weights, strict=True):
        share = math.ceil(math.ceil(size * weight) * surplus)
        datasets.append(_build_source(data, form, split, share, opened[source.prefix]))
    return BlendedDataset(datasets, index, sample)


def _build_source(
    data: DataConfig, form: SampleFormat, split: str, size: int | None, file: IndexedDataset
) -> GPTDataset:
    documents = split_documents(len(file), data.fractions(split))
    num_tokens = int(file.sequence_lengths[documents].sum(dtype=np.int64))
    where = f"{file.prefix}: the {split} split"
    if not len(documents):
        raise ConfigError(
            f"{where} (--split {data.split!r}) holds none of the {len(file)} documents; "
            "give it a larger part, or add documents"
        )
    if num_tokens < form.seq_length + 1:
        raise ConfigError(
            f"{where} holds {num_tokens} tokens in {len(documents)} documents, less than one "
            f"sample of --seq-length {form.seq_length} and the token after it; shorten that, "
            f"enlarge the split (--split {data.split!r}), or add documents"
        )
    dataset = GPTDataset(file, documents, size, form)
    log.debug(
        "dataset split=%s prefix=%s documents=%d tokens=%d samples=%d",
        *(split, file.prefix, len(documents), num_tokens, len(dataset)),
    )
    return dataset


def split_documents(num_documents: int, bounds: tuple[float, float]) -> NDArray[np.int32]:
    """The ids between two fractions of the documents."""
    first, last = (round(bound * float(num_documents)) for bound in bounds)
    return np.arange(first, last, dtype=np.int32)
