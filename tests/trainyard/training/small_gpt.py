"""A GPT small enough to train in a test, on numbers that it can learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trainyard.datasets.config import DataConfig
from trainyard.datasets.gpt import Sample
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.precision import PrecisionConfig
from trainyard.optim.schedule import Rates, build_optimizer_schedule
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.groups import ALONE, ProcessGroups
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.build import build_train_module as build
from trainyard.training.loop.build import built_in_provider, model_sizes
from trainyard.training.loop.data import RunData
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.ledger import Ledger
from trainyard.training.loop.length import length_of
from trainyard.training.loop.loop import TrainLoop
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.step import StepOptions, TrainModule
from trainyard.training.loop.throughput import Workload
from trainyard.training.options.training import TrainingConfig

VOCAB = 32
LENGTH = 12
MODEL = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=LENGTH,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
TRAINING = TrainingConfig(
    micro_batch_size=2, global_batch_size=8, train_iters=6, eval_interval=3, eval_iters=1
)


class Counting:
    """Samples that count upwards from a number of their own; some labels do not count."""

    def __init__(self, length: int = LENGTH, vocab_size: int = VOCAB, num_strides: int = 1) -> None:
        self.length, self.vocab_size, self.num_strides = length, vocab_size, num_strides

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Sample:
        stride = 1 + index % self.num_strides
        text = (index * 7 + stride * np.arange(self.length + 1)) % self.vocab_size
        mask = np.ones(self.length, np.float32)
        mask[: index % 5] = 0.0
        positions = np.arange(self.length)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": mask,
            "position_ids": positions,
        }

    def ids(
        self, indices: np.ndarray[Any, np.dtype[np.int64]]
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.stack([np.zeros_like(indices), indices], axis=1)


@dataclass
class Collector(Callback):
    """Keeps the events of a loop."""

    events: list[StepEvent]

    def after_step(self, event: StepEvent) -> None:
        self.events.append(replace(event, state=TrainState(**event.state.state_dict())))


class ScalarWriter:
    """Stands in for torch's SummaryWriter: keeps the scalars."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, *text: object) -> None: ...

    def close(self) -> None: ...


def without_evaluation(**options: Any) -> TrainingConfig:
    return replace(TRAINING, eval_iters=0, **options)


def build_train_module(
    training: TrainingConfig = TRAINING,
    dropout: float = 0.0,
    groups: ProcessGroups = ALONE,
    seed: int = 5,
) -> TrainModule:
    model = replace(MODEL, hidden_dropout=dropout, attention_dropout=dropout)
    train_module = build(
        built_in_provider(model, VOCAB),
        model_sizes(model, training.micro_batch_size),
        ParallelConfig(),
        OptimizerConfig(lr=0.01),
        PrecisionConfig(),
        groups,
        torch.device("cpu"),
        StepOptions(training.seed, training.calculate_per_token_loss),
    )
    init_parameters(train_module.chunks[0], seed)
    train_module.optimizer.adopt_model_parameters()
    return train_module


def model_of(train_module: TrainModule) -> GPTModel:
    """The model that one process holds whole."""
    (model,) = train_module.chunks
    assert isinstance(model, GPTModel)
    return model


def size_of(training: TrainingConfig, groups: ProcessGroups = ALONE) -> BatchSize:
    """The batch of every step."""
    return length_of(training, groups.dims.dp, LENGTH).batch_size_schedule.final


def rates(learning_rate: float, weight_decay: float) -> Rates:
    """Rates of a step without a decoupled one."""
    return Rates(learning_rate, weight_decay, learning_rate)


def moments_of(train_module: TrainModule) -> dict[str, torch.Tensor]:
    """The moments of the optimizer by name, on one process."""
    return {box.name: box.tensor.clone() for box in train_module.optimizer.state_boxes()}


def run_data(
    train_module: TrainModule,
    training: TrainingConfig,
    valid: Sequence[tuple[str, Counting]],
    config: DataConfig | None = None,
    test: Sequence[tuple[str, Counting]] = (),
) -> RunData:
    """Numbers to train on, and such sets to measure."""
    return RunData(
        config or DataConfig(data_path=("none",)),
        Counting(),
        tuple(valid),
        size_of(training, train_module.groups),
        train_module.groups.dp_rank,
        tuple(test),
    )


def build_loop(
    train_module: TrainModule,
    training: TrainingConfig = TRAINING,
    callbacks: Sequence[Callback] = (),
    state: TrainState | None = None,
    ledger: Ledger | None = None,
    data: RunData | None = None,
    **options: Any,
) -> TrainLoop:
    length = length_of(training, train_module.groups.dims.dp, LENGTH)
    optimizer_schedule = build_optimizer_schedule(
        OptimizerConfig(lr=0.01), training.train_iters, length.global_batch_size
    )
    return TrainLoop(
        train_module,
        optimizer_schedule,
        data or run_data(train_module, training, [("valid", Counting())]),
        training,
        length,
        Workload(LENGTH, 1e6, train_module.groups.dims.world_size),
        callbacks=callbacks,
        state=state,
        ledger=ledger,
        **options,
    )
