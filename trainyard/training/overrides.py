"""What a program may replace in a pretraining: the model, the data, the forward step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from trainyard.datasets.loader import Batch, ExternalData
from trainyard.datasets.sample_format import Sample
from trainyard.datasets.user_datasets import Samples, as_dataset
from trainyard.datasets.vocabulary import check_sample
from trainyard.errors import ConfigError, DataError
from trainyard.models.config import TransformerConfig
from trainyard.models.families import family_of
from trainyard.models.family import GIVEN, PER_PARAMETER, FlopConvention
from trainyard.models.init import init_module, init_parameters
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.parallel.model import ModelParallel
from trainyard.training.loop.build import ModelProvider
from trainyard.training.loop.data import RunData
from trainyard.training.loop.events import Callback
from trainyard.training.loop.length import RunLength, num_samples
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.options.training import TrainingConfig

TrainData = Samples | ExternalData
ValidData = Samples | Mapping[str, Samples] | None

Provided = tuple[TrainData, ValidData] | tuple[TrainData, ValidData, ValidData]

DatasetProvider = Callable[[int, int], Provided]
"""(training samples, validation samples of the run) -> training, validation and optional test data.
Validation and test data are one dataset, several by name, or None. Every rank calls it, and must
get the same samples."""

ForwardStep = Callable[[nn.Module, Tensor | None, Batch], Tensor]
"""(module, hidden states of the stage before, batch) -> the output of `forward_step`."""

Initialize = Callable[[nn.Module, int], None]
"""Fills the parameters of one module in place, given the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Replacements for the parts of `stages.pretrain`; None keeps a part."""

    model_provider: ModelProvider | None = None
    initialize: Initialize | None = None
    """Unset: normal numbers drawn by name, the same under every parallel layout."""
    dataset_provider: DatasetProvider | None = None
    forward_step: ForwardStep | None = None
    """Unset: the module's `forward_step`."""
    flops_per_token: float | None = None
    """Forward and backward, for TFLOP/s and MFU; unset: 6 per parameter."""
    callbacks: Sequence[Callback] = ()
    """Called after the built-in callbacks, on every rank."""
    pads_vocabulary: bool = False
    """The model of `model_provider` has the embedding of the built-in one, padded as there."""
    rows_per_sample: int = 1
    """Rows of hidden states that a sample has in the model."""

    def flop_convention(self, config: TransformerConfig) -> FlopConvention:
        """How TFLOP/s and MFU count operations. config: of the built-in model."""
        if self.model_provider is None:
            return family_of(config).flop_convention
        return PER_PARAMETER if self.flops_per_token is None else GIVEN

    @property
    def identity(self) -> dict[str, str]:
        """Names of the replacements: they are part of the run's lineage."""
        named = {
            name: getattr(self, name)
            for name in ("model_provider", "initialize", "dataset_provider", "forward_step")
        }
        return {
            name: f"{getattr(part, '__module__', '')}.{getattr(part, '__qualname__', '')}"
            for name, part in named.items()
            if part is not None
        }


def initialize_by_name(config: TransformerConfig) -> Initialize:
    """Draws each parameter by its name. config: of a built-in model; others take its numbers."""
    built_in = family_of(config).load_class()

    def by_name(chunk: nn.Module, seed: int) -> None:
        if isinstance(chunk, built_in):
            init_parameters(chunk, seed)
        else:
            init_module(chunk, config, seed)

    return by_name


def placed(provide: ModelProvider) -> ModelProvider:
    """The provider of modules that have their pipeline stage as an attribute, as built-in ones."""

    def provide_placed(parallel: ModelParallel, stage: PipelineStage) -> nn.Module:
        module = provide(parallel, stage)
        if getattr(module, "pipeline_stage", None) is None:
            module.pipeline_stage = stage  # type: ignore[assignment]
        return module

    return provide_placed


def provided_data(
    provide: DatasetProvider,
    config: PretrainConfig,
    length: RunLength,
    dp_rank: int,
    vocab_size: int | None,
) -> RunData:
    """The data of a provider. Refuses too few samples, and samples that cannot be trained on.

    vocab_size: upper bound of the token ids; None if only the model knows it."""
    sizes = num_samples(config.training, length)
    wanted = max(sizes[0], length.consumed)
    train, valid, *rest = provide(wanted, sizes[1])
    check = _Check(vocab_size)
    named = _named(valid, "valid")
    tests = _named(rest[0] if rest else None, "test")
    _check_validation(config.training, config.data.full_validation, named, sizes[1])
    measured, tested = (
        tuple((name, as_dataset(one, f"{name} data", check)) for name, one in sets.items())
        for sets in (named, tests)
    )
    final = length.batch_size_schedule.final
    if isinstance(train, ExternalData):
        return RunData(config.data, train, measured, final, dp_rank, tested)
    least = wanted if config.data.dataloader_type == "single" else final.global_batch_size
    if len(train) < least:
        raise ConfigError(
            f"dataset_provider: the training data has {len(train)} samples and the run needs "
            f"{least}; train for less, provide more, or repeat them with "
            '--dataloader-type cyclic (ProvidedData(dataloader_type="cyclic"))'
        )
    trained = as_dataset(train, "training data", check)
    _ = trained[0], trained.ids(np.zeros(1, np.int64))  # fail on a wrong sample before any work
    return RunData(config.data, trained, measured, final, dp_rank, tested)


def _named(data: ValidData, name: str) -> Mapping[str, Samples]:
    """Datasets by name; a single one is named after its kind."""
    return data if isinstance(data, Mapping) else {} if data is None else {name: data}


def _check_validation(
    training: TrainingConfig, whole: bool, sets: Mapping[str, Samples], wanted: int
) -> None:
    if training.eval_iters and not sets:
        raise ConfigError(
            "dataset_provider returned no validation data, and --eval-iters "
            f"{training.eval_iters} asks for it; return some, or set it to 0"
        )
    for name, one in sets.items():
        if not whole and len(one) < wanted:
            raise ConfigError(
                f"dataset_provider: {name} has {len(one)} samples and its measurements need "
                f"{wanted} (--eval-iters, --eval-interval); measure less, or give "
                "--full-validation"
            )


@dataclass(frozen=True, slots=True)
class _Check:
    """Checks a sample; runs in the loader's worker processes too."""

    vocab_size: int | None

    def __call__(self, sample: Sample, name: str) -> None:
        if "loss_mask" not in sample:
            raise DataError(
                f"{name} has {', '.join(sample)} and no loss_mask, the weight of each token in "
                "the loss: (s,) float32, ones where all count"
            )
        if self.vocab_size is not None:
            check_sample(sample, self.vocab_size, name)
