"""A GPT small enough to train in a test, on numbers that it can learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainyard.datasets.config import DataConfig
from trainyard.datasets.gpt import Sample
from trainyard.models.config import GPTConfig
from trainyard.models.gpt import GPTModel
from trainyard.models.init import init_parameters
from trainyard.optim.adamw import AdamW
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.groups import group_parameters
from trainyard.optim.schedule import build_schedule
from trainyard.parallel.groups import ALONE, ProcessGroups
from trainyard.training.batch_size import constant_batch_size
from trainyard.training.callbacks.base import Callback, StepEvent
from trainyard.training.config import TrainingConfig
from trainyard.training.data import RunData
from trainyard.training.ledger import Ledger
from trainyard.training.loop import TrainLoop
from trainyard.training.metrics import Workload
from trainyard.training.state import TrainState
from trainyard.training.step import GPTForward, Trainee

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

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Sample:
        text = (index * 7 + np.arange(LENGTH + 1)) % VOCAB
        mask = np.ones(LENGTH, np.float32)
        mask[: index % 5] = 0.0
        positions = np.arange(LENGTH)
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


def build_trainee(
    training: TrainingConfig = TRAINING,
    dropout: float = 0.0,
    groups: ProcessGroups = ALONE,
    seed: int = 5,
) -> Trainee:
    model = GPTModel(replace(MODEL, hidden_dropout=dropout, attention_dropout=dropout), VOCAB)
    init_parameters(model, seed)
    return Trainee(
        model,
        GPTForward(model),
        AdamW(group_parameters(model.named_parameters()), OptimizerConfig(lr=0.01)),
        groups,
        constant_batch_size(training.global_batch_size, training.micro_batch_size, groups.dims.dp),
        seed=training.seed,
        clip_grad=1.0,
        per_token=training.calculate_per_token_loss,
    )


def build_loop(
    trainee: Trainee,
    training: TrainingConfig = TRAINING,
    callbacks: Sequence[Callback] = (),
    state: TrainState | None = None,
    ledger: Ledger | None = None,
    **options: Any,
) -> TrainLoop:
    size = trainee.batch_size
    data = RunData(
        DataConfig(data_path=("none",)),
        Counting(),
        (("valid", Counting()),),
        size,
        trainee.groups.dp_rank,
    )
    schedule = build_schedule(
        OptimizerConfig(lr=0.01), training.train_iters, size.global_batch_size
    )
    workload = Workload(size.global_batch_size * LENGTH, 1e6, trainee.groups.dims.world_size)
    return TrainLoop(
        trainee,
        schedule,
        data,
        training,
        workload,
        callbacks=callbacks,
        state=state,
        ledger=ledger,
        **options,
    )
