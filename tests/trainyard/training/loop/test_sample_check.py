"""The run ends before a step whose samples or seeds would differ from the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.trainyard.training.faulty_loaders import (
    AT,
    FAULTS,
    inject_loader_fault,
    skipping,
    swapping,
)
from tests.trainyard.training.small_gpt import (
    TRAINING,
    Collector,
    build_loop,
    build_train_module,
    run_data,
    without_evaluation,
)
from trainyard.datasets.config import DataConfig
from trainyard.datasets.loader import SAMPLE_IDS, Batch, _RankBatches, build_loader
from trainyard.datasets.sample_format import Sample
from trainyard.datasets.sampler import SamplerShape
from trainyard.datasets.serving_order import Serving
from trainyard.datasets.user_datasets import AsDataset
from trainyard.errors import DataError
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import ProcessGroups
from trainyard.training.loop import step as step_module
from trainyard.training.loop.batch_size import BatchSizeSchedule, build_batch_size_schedule
from trainyard.training.loop.data import RunData
from trainyard.training.loop.ledger import digest_samples
from trainyard.training.loop.loop import TrainLoop
from trainyard.training.loop.rerun import StepJudge
from trainyard.training.loop.sample_check import ConsumedSamples, SampleCheck, StepMismatchError
from trainyard.training.loop.seeds import step_digest
from trainyard.training.loop.step import Repeated, TrainModule
from trainyard.training.options.training import TrainingConfig

WITHOUT_EVALUATION = without_evaluation()


def check_refused(
    step: int,
    words: str,
    training: TrainingConfig = WITHOUT_EVALUATION,
    train_module: TrainModule | None = None,
    **options: Any,
) -> None:
    """Run a loop that must end in a step, with nothing of it left anywhere."""
    collector = Collector([])
    train_module = train_module or build_train_module(training)
    loop = build_loop(train_module, training, [collector], **options)
    with pytest.raises(StepMismatchError, match=words) as error:
        loop.run()
    assert f"step {step}, rank 0: " in str(error.value)
    assert error.value.exit_status == 70
    assert [event.record.step for event in collector.events] == list(range(1, step))
    assert loop.state.step == step - 1
    assert loop.state.consumed_train_samples == 8 * (step - 1)
    assert train_module.optimizer.num_updates == step - 1
    assert len(loop.ledger.lines) == step - 1


# --- faulty loaders -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["in front of the loader", "behind the loader"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_with_other_samples_updates_nothing(
    fault: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject_loader_fault(monkeypatch, FAULTS[fault], place)
    row = 2 if fault == "sticks" else 1
    check_refused(2, f"row 0 of micro-batch {row} is sample .* the order of the data")


def test_the_first_sample_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = _RankBatches.__iter__

    def one_row_off(self: _RankBatches) -> Iterator[list[int]]:
        for k, (first, second) in enumerate(indices(self)):
            yield [first, 400 if k == AT else second]

    monkeypatch.setattr(_RankBatches, "__iter__", one_row_off)
    words = (
        "row 1 of micro-batch 1 is sample 400 of source 0, where the order of the data has sample "
        "11 of source 0. The parameters were not updated"
    )
    check_refused(2, words)


@pytest.mark.slow
def test_batches_of_worker_processes_have_sample_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    training, data = without_evaluation(), DataConfig(data_path=("none",), num_workers=2)
    ledgers = []
    for config in (data, replace(data, num_workers=0)):
        train_module = build_train_module(training)
        loop = build_loop(train_module, training, data=run_data(train_module, training, [], config))
        assert loop.run() == "finished"
        ledgers.append(loop.ledger.text())
    assert ledgers[0] == ledgers[1]
    inject_loader_fault(monkeypatch, skipping, "in front of the loader")
    train_module = build_train_module(training)
    data_in_workers = run_data(train_module, training, [], data)
    check_refused(
        2,
        "row 0 of micro-batch 1 is sample 12",
        train_module=train_module,
        data=data_in_workers,
    )


def test_a_skipped_step_consumes_its_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    training = without_evaluation(iterations_to_skip=(2,))
    loop = build_loop(build_train_module(training), training)
    assert loop.run() == "finished"
    plain = build_loop(build_train_module(), without_evaluation())
    assert plain.run() == "finished"
    assert samples_in(loop) == samples_in(plain)
    inject_loader_fault(monkeypatch, swapping, "in front of the loader")
    check_refused(2, "row 0 of micro-batch 1", training)


def samples_in(loop: TrainLoop) -> list[str]:
    return [line.partition('"samples": "')[2][:16] for line in loop.ledger.lines]


def test_a_step_run_again_must_use_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only be handed the right samples by the loader."""
    from_start = Repeated.from_start

    def forgetful(self: Repeated) -> Iterator[Batch]:
        batches = from_start(self)
        if len(self._kept) == 4:
            next(batches)
        return batches

    monkeypatch.setattr(Repeated, "from_start", forgetful)
    train_module = build_train_module()
    train_module._options = replace(train_module._options, judge=StepJudge(None))
    words = "row 0 of micro-batch 0 is sample 2 of source 0"
    check_refused(1, words, TRAINING, train_module)


# --- seeds --------------------------------------------------------------------------------------


def test_a_step_with_another_seed_updates_nothing() -> None:
    train_module = build_train_module(WITHOUT_EVALUATION)
    train_module._options = replace(train_module._options, seed=TRAINING.seed + 1)
    message = "micro-batch 0: the generators of its dropout were seeded with"
    check_refused(1, message, train_module=train_module)


def test_generators_that_were_not_seeded_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is what the generators say of themselves."""
    seed, calls = step_module.seed_generators, itertools.count()

    def now_and_then(*arguments: Any) -> None:
        if next(calls) != AT:
            seed(*arguments)

    monkeypatch.setattr(step_module, "seed_generators", now_and_then)
    check_refused(2, "micro-batch 1: the generators of its dropout were seeded with")


# --- what is carried, and by whom ---------------------------------------------------------------


def test_a_model_does_not_get_the_sample_ids_of_a_batch() -> None:
    train_module, seen = build_train_module(), set[str]()
    forward = train_module._options.forward

    def watched(module: torch.nn.Module, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        seen.update(batch)
        return forward(module, hidden, batch)

    train_module._options = replace(train_module._options, forward=watched)
    assert build_loop(train_module).run() == "finished"
    assert {"tokens", "labels", "loss_mask"} <= seen
    assert SAMPLE_IDS not in seen


def test_an_external_loader_that_ends_too_early_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ending:
        def __len__(self) -> int:
            return 512

        def batches(self, shape: SamplerShape, consumed: int, dp_rank: int) -> Iterator[Batch]:
            data = DataConfig(data_path=("none",))
            whole = build_loader(plain.train, data, shape, consumed, dp_rank)
            return itertools.islice(whole, 6)

    training, train_module = without_evaluation(), build_train_module(without_evaluation())
    plain = run_data(train_module, training, [])
    loop = build_loop(train_module, training, data=replace(plain, train=Ending()))
    with pytest.raises(DataError, match="step 2: the training data ended after 2 of the 4"):
        loop.run()
    assert [line for line in loop.ledger.lines if '"samples": ""' in line] == loop.ledger.lines


def test_invalid_sample_ids_are_refused() -> None:
    class Odd:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Sample:
            return {}

        def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
            return indices

    with pytest.raises(DataError, match=r"train: ids of 3 samples gave .* \(3,\); give \(3, 2\)"):
        AsDataset(Odd(), "train").ids(np.arange(3))


# --- the law ------------------------------------------------------------------------------------


class Numbers:
    """Samples that are their own number, and have another as their id."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Sample:
        return {"tokens": np.array([index])}

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack([indices % 3, 1000 - indices], axis=1)


@dataclass(frozen=True)
class Run:
    """A run, and how one of its legs is cut."""

    dp: int
    micro_batch_size: int
    kind: str
    sharding: bool
    rampup: bool
    leg_begins: int

    @property
    def batch_size_schedule(self) -> BatchSizeSchedule:
        return build_batch_size_schedule(
            global_batch_size=24,
            micro_batch_size=self.micro_batch_size,
            dp=self.dp,
            rampup_batch_size=(12, 12, 40) if self.rampup else (),
        )

    @property
    def data(self) -> DataConfig:
        return DataConfig(
            data_path=("none",),
            dataloader_type=self.kind,  # type: ignore[arg-type]
            data_sharding=self.sharding,
        )


RUNS = st.builds(
    Run,
    dp=st.sampled_from([1, 2, 4]),
    micro_batch_size=st.sampled_from([1, 3]),
    kind=st.sampled_from(["single", "cyclic"]),
    sharding=st.booleans(),
    rampup=st.booleans(),
    leg_begins=st.integers(0, 3),
)


@pytest.mark.slow
@given(RUNS)
@settings(max_examples=40)
def test_the_ledger_has_the_served_samples_under_any_layout(run: Run) -> None:
    """From any step on, on all ranks together; and it is what a proof works out by itself, in more
    than one epoch where the order has several."""
    batch_size_schedule, shape = (
        run.batch_size_schedule,
        SamplerShape(96, run.micro_batch_size, run.dp),
    )
    serving = Serving(shape, shape.per_step, run.kind, run.sharding)
    consumed = batch_size_schedule.samples_after(run.leg_begins)
    ranks = [
        RunData(run.data, Numbers(), (), batch_size_schedule.final, dp_rank)
        for dp_rank in range(run.dp)
    ]
    streams = [data.train_batches(consumed) for data in ranks]
    orders = [data.expected_samples(consumed) for data in ranks]
    dims = ParallelDims(dp=run.dp)
    for step in range(run.leg_begins + 1, run.leg_begins + 4 + 5 * (run.kind == "cyclic")):
        size = batch_size_schedule.at(consumed)
        if run.kind == "single" and consumed + size.global_batch_size > 96:
            break
        indices, carried = [], []
        for dp_rank in range(run.dp):
            taken, count = ConsumedSamples(step, size.num_microbatches), size.num_microbatches
            batches = [*itertools.islice(taken.watch(streams[dp_rank]), count)]
            groups = ProcessGroups(dims, dp_rank)
            evidence = SampleCheck(step, size, 7, groups, orders[dp_rank])
            evidence.check_samples(taken)
            indices.append([batch["tokens"][:, 0].numpy() for batch in batches])
            carried.append(taken.ids)
            served = serving.samples(consumed, size.global_batch_size)
            whole = digest_samples(Numbers().ids(served))
            assert evidence.samples == (whole if dp_rank == 0 else None)
        in_order = np.stack(indices, axis=1)  # micro-batches, ranks, rows
        assert in_order.ravel().tolist() == served.tolist()
        assert np.array_equal(
            np.stack(carried, axis=1).reshape(-1, 2), Numbers().ids(in_order.ravel())
        )
        consumed += size.global_batch_size


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_a_rank_that_reads_the_samples_of_another_is_detected(kind: str, fault: str) -> None:
    run = Run(2, 1, kind, sharding=False, rampup=False, leg_begins=0)
    for dp_rank in range(2):
        data = RunData(run.data, Numbers(), (), run.batch_size_schedule.final, dp_rank)
        groups = ProcessGroups(ParallelDims(dp=2), dp_rank)
        for served in (data, replace(data, dp_rank=1 - dp_rank)):
            batches = served.train_batches(0)
            taken = ConsumedSamples(1, 12)
            evidence = SampleCheck(
                1, run.batch_size_schedule.final, 7, groups, data.expected_samples(0)
            )
            stream = batches if served is data else FAULTS[fault](batches)
            _ = [*itertools.islice(taken.watch(stream), 12)]
            if served is data:
                evidence.check_samples(taken)
                continue
            with pytest.raises(StepMismatchError, match=f"step 1, rank {dp_rank}: row 0 of micro"):
                evidence.check_samples(taken)
            assert evidence.samples == ""


def test_only_rank_0_looks_at_the_samples_of_other_ranks() -> None:
    asked: list[int] = []

    class Counted(Numbers):
        def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
            asked.append(len(indices))
            return super().ids(indices)

    run = Run(2, 1, "single", sharding=False, rampup=False, leg_begins=0)
    for dp_rank in range(2):
        data = RunData(run.data, Counted(), (), run.batch_size_schedule.final, dp_rank)
        expected = data.expected_samples(0)
        taken = ConsumedSamples(1, 12)
        _ = [*itertools.islice(taken.watch(data.train_batches(0)), 12)]
        asked.clear()
        groups = ProcessGroups(ParallelDims(dp=2), dp_rank)
        SampleCheck(1, run.batch_size_schedule.final, 7, groups, expected).check_samples(taken)
        assert asked == [96 if dp_rank == 0 else 48]  # of all four steps that there are


def test_the_digest_of_seeds_equals_that_of_the_proof() -> None:
    collector = Collector([])
    build_loop(build_train_module(dropout=0.1), callbacks=[collector]).run()
    for event in collector.events:
        assert event.record.rng == step_digest(TRAINING.seed, event.record.step, 4)
