"""Options of `stages.classify`: those of a training, with data sets of RACE, MNLI or QQP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from stages.pretrain.config import PretrainConfig
from trainyard.errors import ConfigError
from trainyard.training.classification.config import (
    HEADS,
    NEW,
    ClassificationConfig,
    ClassificationData,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyConfig(PretrainConfig):
    """Fine-tune a BERT on RACE, MNLI or QQP, and measure its accuracy on every data set after every
    epoch. Options of the model and the tokenizer that are not given are those of the checkpoint.

    With the same options and data, a rerun resumes from the last checkpoint in --save."""

    RESOLVED_BY: ClassVar[str] = "stages.pretrain.resolve_classify"

    classification: ClassificationConfig
    data: ClassificationData = field(default_factory=ClassificationData)

    def __post_init__(self) -> None:
        """Refuse what a classifier is not; let it begin with the weights of any BERT."""
        if self.model.model_type != "bert":
            raise ConfigError(
                f"--model-type {self.model.model_type}: {self.classification.task} is a task for a "
                "bert; leave the option out"
            )
        if self.finetune and not self.load_allow_missing and not self.load_allow_unexpected:
            object.__setattr__(self, "load_allow_missing", NEW)
            object.__setattr__(self, "load_allow_unexpected", HEADS)
        PretrainConfig.__post_init__(self)  # super() fails in a dataclass with slots
        parallel, training = self.parallel, self.training
        if parallel.is_interleaved or parallel.pipeline_model_parallel_layout is not None:
            raise ConfigError(
                "virtual pipeline stages do not apply to a classifier, which is measured by a "
                "forward pass alone; leave their options out"
            )
        if training.rampup_batch_size or training.step_batch_size_schedule:
            raise ConfigError(
                "--rampup-batch-size and --step-batch-size-schedule: an epoch of a classifier has "
                "batches of one size; leave them out"
            )
        if training.train_samples is not None:
            raise ConfigError(
                f"--train-samples {training.train_samples}: give --epochs, passes over --train-data"
            )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Those of the training, and the data sets."""
        data = self.classification
        found = PretrainConfig.inputs(self)
        return {**found, "train_data": data.train_data, "valid_data": data.valid_data}

    def check_ranks(self, world_size: int | None) -> None:
        """As for a training, once the number of its steps is known."""
        if self.training.epochs is None:
            PretrainConfig.check_ranks(self, world_size)
