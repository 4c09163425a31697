"""State in host memory: on a CPU the bits of state beside the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.trainyard.optim.sharded_parameters import Case, build, run_case, run_in_halves
from tests.trainyard.optim.test_optimizer import BF16, FP16, OVERLAPPED, ZERO, check_equal, run
from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.host_piece import HostPiece
from trainyard.optim.precision import PrecisionConfig
from trainyard.testing.pool import RankPool

ADAM = OptimizerConfig(lr=0.1, clip_grad=5.0)


def offloaded(fraction: float, **options: Any) -> OptimizerConfig:
    return replace(ADAM, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction, **options)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("precision", "kind"),
    [(PrecisionConfig(), "sgd"), (PrecisionConfig(), "adam"), (BF16, "adam"), (FP16, "lion")],
)
def test_any_share_of_the_state_may_be_on_the_host(precision: PrecisionConfig, kind: Any) -> None:
    case = Case(precision=precision, optimizer=replace(ADAM, optimizer=kind))
    beside = run_case(case)
    for fraction in (0.3, 1.0):
        there = replace(case, optimizer=offloaded(fraction, optimizer=kind))
        check_equal([run_case(there)], [beside])


def test_parts_of_any_size_are_updated_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(precision=BF16, optimizer=offloaded(1.0))
    whole = run_case(case)
    for size in (1, 200):
        monkeypatch.setattr("trainyard.optim.host_piece.PART", size)
        check_equal([run_case(case)], [whole])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("precision", [PrecisionConfig(), BF16], ids=["fp32", "bf16"])
def test_ranks_offload_their_shares(ranks: RankPool, precision: PrecisionConfig) -> None:
    there = offloaded(0.6)
    for data in (ZERO, OVERLAPPED):
        plain = run(ranks, Case(2, 2, data, precision))
        check_equal(run(ranks, Case(2, 2, data, precision, there)), plain)
    pairs = ranks.run(run_in_halves, 2, Case(2, 1, ZERO, precision, there))
    check_equal([whole for whole, _ in pairs], [half for _, half in pairs])


def test_the_fraction_is_of_the_numbers() -> None:
    for fraction in (0.25, 0.5, 1.0):
        _, optimizer, _ = build(Case(precision=BF16, optimizer=offloaded(fraction)))
        units = optimizer._units
        there = sum(p.main.numel() for u in units if isinstance(u, HostPiece) for p in u.pieces)
        everywhere = sum(p.main.numel() for u in units for p in u.pieces)
        assert there == pytest.approx(fraction * everywhere, abs=128)


def test_what_cannot_be_offloaded_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--optimizer-offload-fraction must be in \[0, 1\]"):
        offloaded(1.5)
    with pytest.raises(ConfigError, match="--optimizer-cpu-offload and --optimizer muon exclude"):
        offloaded(1.0, optimizer="muon")
