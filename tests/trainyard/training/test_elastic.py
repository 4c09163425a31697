"""Resuming with other numbers of ranks and other layouts: same samples, losses and certificate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import COMPUTED, certificate, exact, go, ledger
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import BF16_LAYOUT, FP32_LAYOUT, LEARNING
from trainyard.training.run.dp_history import DpSpan

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@dataclass(frozen=True, slots=True)
class Way:
    """How the ranks of one leg share a run."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: bool = False
    sequence_parallel: bool = False
    chunks: int = 1
    sharding: str | None = None
    instances: int = 1

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def options(self) -> dict[str, Any]:
        found = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "use_distributed_optimizer": self.zero,
            "sequence_parallel": self.sequence_parallel,
            "data_parallel_sharding_strategy": self.sharding,
            "num_distributed_optimizer_instances": self.instances,
        }
        if self.chunks > 1:
            found["num_virtual_stages_per_pipeline_rank"] = self.chunks
        return found


JOURNEYS: dict[str, tuple[Way, ...]] = {
    "dp 2, 1": (Way(dp=2), Way()),
    "dp 4, 2, 8": (Way(dp=4), Way(dp=2), Way(dp=8)),
    "tp 1, 2, 4": (Way(), Way(tp=2), Way(tp=4, sequence_parallel=True)),
    "pp 1, 2": (Way(), Way(pp=2)),
    "pp 2 with chunks, 4": (Way(pp=2, chunks=2), Way(pp=4)),
    "tp 2, cp 2": (Way(tp=2), Way(cp=2)),
    "zero on, off, on": (Way(dp=2, zero=True), Way(dp=2), Way(dp=4, zero=True)),
    "weights sharded, state, nothing": (
        Way(dp=4, sharding="optim_grads_params"),
        Way(dp=2, zero=True),
        Way(),
    ),
    "instances, tp with gradients sharded": (
        Way(dp=4, zero=True, instances=2),
        Way(dp=2, tp=2, sharding="optim_grads"),
        Way(dp=4, sharding="optim_grads_params", instances=2),
    ),
    "all at once": (Way(tp=2, pp=2, dp=2, zero=True), Way(cp=2, dp=2), Way(pp=2, tp=2)),
}
QUICK = ("dp 2, 1",)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("tokens") / "t", [60] * 60)


@pytest.fixture(scope="module")
def undisturbed(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process, from the first step to the last."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert go(tokens, folder) == "finished"
    return folder


def travel(
    tokens: str, folder: Path, ways: tuple[Way, ...], ranks: RankPool, **options: Any
) -> None:
    """Six steps in as many legs as there are ways; all but the last are stopped at their end."""
    for number, way in enumerate(ways, 1):
        outcome = go(
            tokens,
            folder,
            ranks,
            way.world_size,
            **way.options,
            **options,
            exit_interval=6 // len(ways),
        )
        assert outcome == ("finished" if number == len(ways) else "paused")


def assert_same_run(folder: Path, expected: Path, tolerance: dict[str, float]) -> None:
    """All that is exact is the same; what sums make is within the tolerance."""
    found, right = ledger(folder), ledger(expected)
    assert exact(found, {}) == exact(right, {})
    for line, other in zip(found, right, strict=True):
        for name in COMPUTED:
            assert (name in line) == (name in other)
            if name in line:
                assert line[name] == pytest.approx(other[name], rel=tolerance[name]), name


FP32 = {
    "lm_loss": FP32_LAYOUT.loss,
    "validation_loss": FP32_LAYOUT.loss,
    "grad_norm": FP32_LAYOUT.grad_norm,
}


@pytest.mark.parametrize(
    "journey",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in JOURNEYS],
)
def test_a_run_resumes_under_other_layouts(
    journey: str, tokens: str, undisturbed: Path, ranks: RankPool, tmp_path: Path
) -> None:
    ways, folder = JOURNEYS[journey], tmp_path / "run"
    travel(tokens, folder, ways, ranks)
    assert_same_run(folder, undisturbed, FP32)
    found = certificate(folder)
    assert found.is_proven, found.sentence
    assert found.is_complete
    assert sum(s.last_step - s.first_step + 1 for s in found.spans) == 6
    dps = [way.dp for way in ways]
    assert [s.data_parallel_size for s in found.spans] == [
        dp for k, dp in enumerate(dps) if not k or dp != dps[k - 1]
    ]


@pytest.mark.slow
def test_a_run_resumes_with_another_padding_of_the_vocabulary(
    tokens: str, ranks: RankPool, tmp_path: Path
) -> None:
    """1021 tokens are 1021 rows on one rank, 1022 on two and 1024 on four: each padded row is one
    more summand of the softmax, a part in a thousand of it where nothing is learnt yet."""
    odd = {"vocab_size": 1021}
    ways = (Way(tp=4), Way(), Way(tp=2))
    for untied in (False, True):
        more = {**odd, "untie_embeddings_and_output_weights": untied}
        whole = tmp_path / f"whole-{untied}"
        assert go(tokens, whole, **more) == "finished"
        travel(tokens, tmp_path / f"run-{untied}", ways, ranks, **more)
        bounds = dict.fromkeys(COMPUTED, LEARNING) | {"grad_norm": 10 * LEARNING}
        assert_same_run(tmp_path / f"run-{untied}", whole, bounds)
        assert certificate(tmp_path / f"run-{untied}").is_complete


NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}


@pytest.mark.slow
@pytest.mark.parametrize("formats", [{"bf16": True}, {"bf16": True, **NARROW}])
def test_a_16_bit_run_resumes_under_other_layouts(
    formats: dict[str, Any], tokens: str, ranks: RankPool, tmp_path: Path
) -> None:
    bounds = dict.fromkeys(COMPUTED, BF16_LAYOUT.loss) | {"grad_norm": BF16_LAYOUT.grad_norm}
    assert go(tokens, tmp_path / "whole", **formats) == "finished"
    sharded = Way(dp=2, sharding="optim_grads_params")
    for number, ways in enumerate(
        [(Way(dp=2, zero=True), Way(tp=2, pp=2), Way()), (Way(tp=2), sharded, Way(dp=2, zero=True))]
    ):
        folder = tmp_path / f"run {number}"
        travel(tokens, folder, ways, ranks, **formats)
        assert_same_run(folder, tmp_path / "whole", bounds)
        assert certificate(folder).is_complete


@pytest.mark.slow
@pytest.mark.parametrize("formats", [{}, {"bf16": True}])
def test_a_run_moves_its_state_to_the_host_and_back(
    formats: dict[str, Any], tokens: str, tmp_path: Path
) -> None:
    """Where the state is decides no bit, on a CPU, and is no part of a run."""
    assert go(tokens, tmp_path / "whole", **formats) == "finished"
    run = tmp_path / "run"
    offloaded = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.7}
    for more, outcome in (({}, "paused"), (offloaded, "paused"), ({}, "finished")):
        assert go(tokens, run, **formats, **more, exit_interval=2) == outcome
    assert (run / "ledger.jsonl").read_bytes() == (tmp_path / "whole/ledger.jsonl").read_bytes()


def test_a_run_resumes_with_another_micro_batch_size(tokens: str, tmp_path: Path) -> None:
    """In the same folder or in another: the same samples, and without dropout (which is drawn for
    each micro-batch) the same losses but for rounding."""
    still = {"hidden_dropout": 0.0}
    whole, here, there = (tmp_path / name for name in ("whole", "here", "there"))
    assert go(tokens, whole, **still) == "finished"
    assert go(tokens, here, **still, exit_interval=3) == "paused"
    more = {**still, "micro_batch_size": 4}
    assert go(tokens, there, **more, load=str(here)) == "finished"
    joined, first = certificate(there), certificate(here, data_path=[tokens])
    assert first.is_complete, first.sentence
    assert (first.finished, first.last_step) == (False, 3)
    assert go(tokens, here, **more) == "finished"
    right, seeds = ledger(whole)[3:], {"rng": ()}  # one for each micro-batch
    for folder in (here, there):
        found = ledger(folder)[-3:]
        assert exact(found, seeds) == exact(right, seeds)
        for line, other in zip(found, right, strict=True):
            assert line["lm_loss"] == pytest.approx(other["lm_loss"], rel=FP32_LAYOUT.loss)
    assert joined.is_complete, joined.sentence
    assert (joined.first_step, joined.begins_at) == (4, "step 3 of another run")
    assert joined.spans == (DpSpan(4, 6, 1, 4),)
    in_place = certificate(here, data_path=[tokens])
    assert in_place.is_complete, in_place.sentence
    assert [span.micro_batch_size for span in in_place.spans][-1] == 4
    assert (in_place.finished, in_place.last_step, len(in_place.spans)) == (True, 6, 2)


@pytest.mark.slow
def test_a_run_killed_five_times_under_three_layouts_is_certified(
    tokens: str, undisturbed: Path, ranks: RankPool, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    legs: list[tuple[Way, int | None]] = [
        (Way(dp=2), 1),  # before anything is saved: all of it is lost
        (Way(dp=2), 3),
        (Way(tp=2), 3),
        (Way(tp=2, dp=2, zero=True), 5),
        (Way(pp=2), 5),
        (Way(), None),
    ]
    outcomes = []
    for way, dies_after in legs:
        more = {**way.options, "save_interval": 2}
        outcomes.append(go(tokens, folder, ranks, way.world_size, dies_after, **more))
        if dies_after not in (None, 1):
            found = certificate(folder, data_path=[tokens])
            assert found.is_complete, found.sentence
    assert outcomes == [*["died"] * 5, "finished"]
    assert_same_run(folder, undisturbed, FP32)
    found = certificate(folder)
    assert found.is_complete, found.sentence
    assert found.published_steps == (2, 4, 6)
