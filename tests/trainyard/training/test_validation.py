"""Several validation sets, and the whole of them: what is measured, recorded and shown."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainyard.training.small import (
    TRAINING,
    Collector,
    Counting,
    build_loop,
    build_trainee,
    model_of,
    run_data,
)
from trainyard.datasets.config import DataConfig
from trainyard.datasets.loader import collate
from trainyard.datasets.sampler import WholeShare
from trainyard.training.callbacks.console import Console
from trainyard.training.config import TrainingConfig
from trainyard.training.facts import RunFacts
from trainyard.training.ledger import StepRecord
from trainyard.training.microbatch import masked_loss


class Shifted(Counting):
    """Other samples, and another number of them."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return super().__getitem__(self.first + index)


def run(training: TrainingConfig, *valid: Counting, full: bool = False) -> tuple[Any, list[str]]:
    trainee = build_trainee(training)
    collector, lines = Collector([]), []
    assert training.train_iters is not None
    console = Console(RunFacts(training.train_iters), 1, write=lines.append)
    config = DataConfig(data_path=("none",), full_validation=full)
    data = run_data(trainee, training, list(zip("abc", valid, strict=False)), config)
    build_loop(trainee, training, [collector, console], data=data).run()
    return (trainee, [event.record for event in collector.events]), lines


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [0, 1, 5, 24, 25, 100])
def test_the_shares_of_all_ranks_are_every_sample_once(dp: int, num_samples: int) -> None:
    shares = [WholeShare(num_samples, 4, dp, rank) for rank in range(dp)]
    served = [sample for share in shares for batch in share for sample in batch]
    assert sorted(served) == list(range(num_samples))
    assert all(0 < len(batch) <= 4 for share in shares for batch in share)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_full_validation_is_the_mean_over_every_token_of_the_set() -> None:
    training = replace(TRAINING, train_iters=3, eval_interval=3)
    valid = Shifted(100, 13)  # no whole number of micro-batches
    (trainee, records), _ = run(training, valid, full=True)
    batch = collate([valid[i] for i in range(13)])
    with torch.no_grad():
        losses = model_of(trainee).eval().loss(batch["tokens"], batch["labels"])
    mean = masked_loss(losses, batch) / batch["loss_mask"].sum()
    assert records[-1].validation_loss == pytest.approx(float(mean), rel=1e-6)
    assert records[-1].validation_losses is None


def test_each_set_is_measured_by_itself_and_shown_by_number() -> None:
    training = replace(TRAINING, train_iters=3, eval_interval=3)
    sets = (Shifted(0, 64), Shifted(200, 40))
    (_, records), lines = run(training, *sets)
    alone = [run(training, one)[0][1][-1].validation_loss for one in sets]
    assert records[-1].validation_losses == dict(zip("ab", alone, strict=True))
    assert records[-1].validation_loss == sum(alone) / 2
    assert json.loads(records[-1].line())["validation_losses"] == {"a": alone[0], "b": alone[1]}
    shown = [line for line in lines if "validation" in line]
    assert [line.split(" loss at")[0] for line in shown] == [" validation-0", " validation-1"]
    assert f"lm loss value: {alone[1]:.6E}" in shown[1]


def test_one_set_is_recorded_as_ever() -> None:
    record = StepRecord(3, 6, 12)
    record.set_validation({"valid": 1.5})
    assert json.loads(record.line()) == {
        "step": 3,
        "consumed_train_samples": 6,
        "tokens": 12,
        "validation_loss": 1.5,
    }
