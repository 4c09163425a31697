"""The parts of a training that a classifier replaces: the model, the data, and a callback that
measures accuracy after every epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from trainyard.datasets.classification.samples import (
    ClassifierSamples,
    Epochs,
    num_outputs,
    read_examples,
    rows_per_sample,
)
from trainyard.datasets.user_datasets import Samples
from trainyard.evaluation.passport import set_names
from trainyard.evaluation.tasks import Units
from trainyard.models.bert.classifier import BertClassifier
from trainyard.models.bert.config import BertConfig
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.parallel.groups import ProcessGroups
from trainyard.parallel.model import ModelParallel, group_size
from trainyard.tokenizers.base import Tokenizer
from trainyard.training.classification.accuracy import EpochAccuracy
from trainyard.training.classification.config import ClassificationConfig
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.overrides import Overrides


@dataclass(frozen=True, slots=True)
class ClassificationParts:
    """What replaces the parts of a pretraining on this rank."""

    config: PretrainConfig
    classification: ClassificationConfig
    tokenizer: Tokenizer
    built: list[nn.Module] = field(default_factory=list)
    """The modules of this rank, once the training has built them."""

    def samples(self, url: str) -> ClassifierSamples:
        """A data set."""
        task = self.classification.task
        examples = read_examples(url, task)
        return ClassifierSamples.of(task, examples, self.tokenizer, self.config.model.seq_length)

    def valid_sets(self) -> dict[str, ClassifierSamples]:
        """The data sets to measure, by name."""
        urls = self.classification.valid_data
        return {name: self.samples(url) for name, url in zip(set_names(urls), urls, strict=True)}

    def overrides(
        self, groups: ProcessGroups, device: torch.device, units: Units
    ) -> tuple[Overrides, EpochAccuracy]:
        """The replacements for the trainer, and the callback among them."""
        valid = self.valid_sets()
        training = self.config.training
        batch = training.global_batch_size or training.micro_batch_size * groups.dims.dp
        steps_per_epoch = training.eval_interval
        accuracy = EpochAccuracy(
            built=self.built,
            sets=valid,
            groups=groups,
            device=device,
            micro_batch_size=training.micro_batch_size,
            steps_per_epoch=steps_per_epoch,
            units=units,
            is_alone=self.config.skip_train,
            sequence_parallel=self.config.parallel.sequence_parallel,
        )

        def provide_data(num_train: int, num_valid: int) -> tuple[Epochs, dict[str, Samples]]:
            whole = self._training_set()
            per_epoch = steps_per_epoch * batch
            num_epochs = -(-num_train // per_epoch) if num_train else 1
            return Epochs(whole, per_epoch, num_epochs, training.seed), dict(valid)

        overrides = Overrides(
            model_provider=self._provide_model,
            dataset_provider=provide_data,
            callbacks=(accuracy,),
            pads_vocabulary=True,
            rows_per_sample=rows_per_sample(self.classification.task),
        )
        return overrides, accuracy

    def _training_set(self) -> ClassifierSamples:
        task, urls = self.classification.task, self.classification.train_data
        examples: Sequence[object] = [one for url in urls for one in read_examples(url, task)]
        return ClassifierSamples.of(task, examples, self.tokenizer, self.config.model.seq_length)

    def _provide_model(self, parallel: ModelParallel, stage: PipelineStage) -> nn.Module:
        model, tokens = self.config.model, self.tokenizer.vocab_size
        assert isinstance(model, BertConfig)
        rows = model.padded_vocab_size(tokens, group_size(parallel.tp))
        outputs = num_outputs(self.classification.task)
        built = BertClassifier(model, rows, outputs, parallel, stage, tokens)
        self.built.append(built)
        return built
