"""Several validation and test sets, and the whole of them: what is measured, recorded and shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainyard.training.small_gpt import (
    TRAINING,
    Collector,
    Counting,
    ScalarWriter,
    build_loop,
    build_train_module,
    model_of,
    run_data,
)
from trainyard.config import from_dict
from trainyard.datasets.config import DataConfig
from trainyard.datasets.loader import collate
from trainyard.datasets.sampler import WholeShare
from trainyard.errors import ConfigError
from trainyard.parallel.config import ParallelConfig
from trainyard.training.logging.console import Console
from trainyard.training.logging.jsonl import JsonLines
from trainyard.training.logging.run_info import RunInfo
from trainyard.training.logging.tensorboard import TensorBoard
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.data import RunData, check_whole_sets
from trainyard.training.loop.events import Callback
from trainyard.training.loop.ledger import EvaluationLosses, StepRecord
from trainyard.training.loop.state import TrainState
from trainyard.training.options.logging import LoggingConfig
from trainyard.training.options.training import TrainingConfig


class Shifted(Counting):
    """Other samples, and another number of them."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return super().__getitem__(self.first + index)


def run(
    training: TrainingConfig,
    *valid: Counting,
    full: bool = False,
    test: Sequence[Counting] = (),
    loggers: Sequence[Callback] = (),
) -> tuple[Any, list[str]]:
    train_module = build_train_module(training)
    collector, lines = Collector([]), []
    assert training.train_iters is not None
    console = Console(RunInfo(training.train_iters), 1, write=lines.append)
    config = DataConfig(data_path=("none",), full_validation=full)
    sets, tests = (list(zip("abc", some, strict=False)) for some in (valid, test))
    data = run_data(train_module, training, sets, config, tests)
    build_loop(train_module, training, [collector, console, *loggers], data=data).run()
    return (train_module, [event.record for event in collector.events]), lines


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
    (train_module, records), _ = run(training, valid, full=True)
    batch = collate([valid[i] for i in range(13)])
    with torch.no_grad():
        losses = model_of(train_module).eval().loss(batch["tokens"], batch["labels"])
    mean = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    assert records[-1].validation_loss == pytest.approx(float(mean), rel=1e-6)
    assert records[-1].validation_losses is None


def checked(parallel: dict[str, Any], valid: int, test: int, *, full: bool = True) -> None:
    """Two ranks with micro-batches of 2, eval_iters 3."""
    data = RunData(
        DataConfig(data_path=("none",), full_validation=full),
        Counting(),
        (("a", Shifted(0, valid)),),
        BatchSize(4, 2, 2),
        test=(("b", Shifted(0, test)),),
    )
    config: Any = SimpleNamespace(
        training=replace(TRAINING, eval_iters=3), parallel=from_dict(ParallelConfig, parallel)
    )
    check_whole_sets(config, data)


EXPERTS = {"expert_model_parallel_size": 2}
SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params"}
PIPELINE = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize("parallel", [EXPERTS, SHARDED, EXPERTS | PIPELINE])
def test_ranks_that_wait_for_each_other_measure_only_sets_that_divide(
    parallel: dict[str, Any],
) -> None:
    checked(parallel, 8, 12)
    checked(parallel, 7, 12, full=False)
    with pytest.raises(ConfigError, match="validation set 'a' is measured whole, and its 6 sam"):
        checked(parallel, 6, 12)
    with pytest.raises(ConfigError, match="test set 'b' is measured whole, and its 10 samples"):
        checked(parallel, 8, 10)
    checked(PIPELINE, 7, 5)  # replicas that only add up their losses


def test_a_part_of_a_micro_batch_is_for_weights_in_shards_alone() -> None:
    checked(SHARDED, 7, 12)  # two passes on each rank
    for parallel in (EXPERTS, EXPERTS | PIPELINE):
        with pytest.raises(ConfigError, match="must compute the same micro-batches"):
            checked(parallel, 7, 12)


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


def test_a_single_set_is_recorded_without_names() -> None:
    record = StepRecord(3, 6, 12)
    record.set_validation({"valid": EvaluationLosses(1.5)})
    assert json.loads(record.line()) == {
        "step": 3,
        "consumed_train_samples": 6,
        "tokens": 12,
        "validation_loss": 1.5,
    }


# --- test sets --------------------------------------------------------------------------------


def test_test_data_are_measured_once_after_the_last_step(
    tmp_path: Path,
) -> None:
    info, options = RunInfo(6), LoggingConfig(log_validation_ppl_to_tensorboard=True)
    entered, path = ScalarWriter(), tmp_path / "metrics.jsonl"
    sinks = [TensorBoard(entered, options, info), JsonLines(path, info)]
    valid, test = Shifted(0, 64), Shifted(200, 40)
    (_, records), lines = run(TRAINING, valid, test=[test], loggers=sinks)
    (_, without), _ = run(TRAINING, valid)
    assert [record.step for record in records if record.test_loss is not None] == [6]
    alone = run(replace(TRAINING, eval_interval=6), test)[0][1][-1].validation_loss
    assert records[-1].test_loss == alone  # the first samples of the set, by the last weights
    assert records[-1].validation_loss != alone
    for record in records:
        record.test_loss = None
    assert [r.line() for r in records] == [r.line() for r in without]
    shown = [line.split(" | ")[0] for line in lines if "loss at" in line]
    assert shown == [
        " validation loss at iteration 3",
        " validation loss at iteration 6 on validation set",
        " validation loss at iteration 6 on test set",
    ]
    assert sum(f"lm loss value: {alone:.6E} | lm loss PPL: " in line for line in lines) == 1
    written = {tag: (value, step) for tag, value, step in entered.scalars if "test" in tag}
    assert written["lm loss test"] == (alone, 6)
    assert written["lm loss test vs samples"] == (alone, 48)
    assert len(written) == 4  # the perplexity too, and both by samples
    assert json.loads(path.read_text().splitlines()[-1])["test_loss"] == alone


@pytest.mark.parametrize("full", [False, True])
def test_several_test_sets_and_the_whole_of_a_small_one(full: bool) -> None:
    training = replace(TRAINING, train_iters=2, eval_interval=2)
    small, large = Shifted(100, 5), Shifted(200, 40)  # a measurement takes 8
    (_, records), lines = run(training, Shifted(0, 64), full=full, test=[small, large])
    whole = run(training, small, full=True)[0][1][-1].validation_loss
    other = run(training, large)[0][1][-1].validation_loss  # its first samples, in any case
    assert records[-1].test_losses == {"a": whole, "b": other}
    assert records[-1].test_loss == (whole + other) / 2
    shown = [line.split(" loss at")[0] for line in lines if "on test set" in line]
    assert shown == [" validation-0", " validation-1"]


def test_without_validation_there_is_no_test_loss() -> None:
    (_, records), lines = run(replace(TRAINING, eval_iters=0), Shifted(0, 64), test=[Shifted(9, 9)])
    assert all(record.test_loss is None for record in records)
    assert not any("loss at" in line for line in lines)


@pytest.mark.slow
def test_a_stop_between_validation_and_test_leaves_both_for_later() -> None:
    train_module = build_train_module()
    collector, calls = Collector([]), count(1)
    data = run_data(
        train_module, TRAINING, [("valid", Counting())], test=[("test", Shifted(9, 64))]
    )
    build_loop(build_train_module(), callbacks=[whole := Collector([])], data=data).run()
    # Six steps and two measurements of four batches look once each, and once more at their end.
    loop = build_loop(
        train_module,
        callbacks=[collector],
        data=data,
        stop_requested=lambda: next(calls) >= 6 + 2 * 5 + 2,
    )
    assert loop.run() == "stopped"
    assert loop.state.unmeasured["step"] == 6
    assert "validation_loss" not in loop.state.unmeasured
    state = TrainState()
    state.load_state_dict(json.loads(json.dumps(loop.state.state_dict())))
    rest = build_loop(
        train_module, callbacks=[collector], data=data, state=state, ledger=loop.ledger
    )
    assert rest.run() == "finished"
    assert rest.ledger.text() == whole.events[-1].ledger.text()
