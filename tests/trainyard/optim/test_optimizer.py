"""Whole steps: the same however they are cut, and equal to formulas written out here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.optim.sharded_parameters import (
    NUM_MICROBATCHES,
    STEPS,
    WHOLES,
    Case,
    Result,
    run_case,
    run_in_halves,
    values,
    wholes_of,
)
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_UPDATE

BF16 = PrecisionConfig(bf16=True)
FP16 = PrecisionConfig(fp16=True, initial_loss_scale=2.0**12, hysteresis=1, loss_scale_window=2)
FP16_GRADS = replace(FP16, grad_reduce_in_fp16=True)
NAMES = {"fp32": "float32", "bf16": "bfloat16"}
ZERO = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=300)
OVERLAPPED = replace(ZERO, overlap_grad_reduce=True, overlap_param_gather=True)


def run(ranks: RankPool, case: Case) -> list[Result]:
    return ranks.run(run_case, case.dp * case.tp, case)


def check_equal(ones: list[Result], others: list[Result]) -> None:
    """Bit for bit."""
    for one, other in zip(ones, others, strict=True):
        assert one.outcomes == other.outcomes
        assert one.params_norm == other.params_norm
    a, b = wholes_of(ones), wholes_of(others)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def check_close(ones: list[Result], others: list[Result], **bounds: Any) -> None:
    """Up to the order of sums; 16-bit parameters by their fp32 originals."""
    a, b = wholes_of(ones), wholes_of(others)
    names = {n for n in a if n not in WHOLES or a[n].dtype == torch.float32}
    for name in sorted(names & b.keys()):
        torch.testing.assert_close(a[name], b[name], **bounds)
    for one, other in zip(ones[0].outcomes, others[0].outcomes, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert one.num_zeros == other.num_zeros
    assert ones[0].params_norm == pytest.approx(others[0].params_norm, rel=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("precision", [PrecisionConfig(), BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_the_distributed_optimizer_takes_the_plain_step_bit_for_bit(
    ranks: RankPool, dp: int, tp: int, precision: PrecisionConfig
) -> None:
    """gloo reduces and scatters as it reduces to all; norms are rounded from fp64.

    The buckets are the same: over four ranks the order of a sum depends on the place in them."""
    plain = run(ranks, Case(dp, tp, DataParallelConfig(ddp_bucket_size=300), precision))
    check_equal(run(ranks, Case(dp, tp, ZERO, precision)), plain)
    check_equal(run(ranks, Case(dp, tp, OVERLAPPED, precision)), plain)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("precision", [PrecisionConfig(), BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_ranks_take_the_step_of_one_process(ranks: RankPool, precision: PrecisionConfig) -> None:
    alone = [run_case(Case(precision=precision))]
    # Products are rounded to 16 bits in another order where a parameter is cut: none here.
    for dp, tp, data in [(1, 2, None), (2, 1, None), (2, 2, ZERO), (4, 2, OVERLAPPED)]:
        case = Case(dp, tp, data or DataParallelConfig(), precision)
        check_close(run(ranks, case), alone, **FP32_UPDATE)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_take_the_same_bits_whatever_the_buckets(ranks: RankPool) -> None:
    first = run(ranks, Case(2, 1, ZERO, BF16))
    for size in (1, 64, 1000, 10_000_000):
        for overlap in (False, True):
            data = DataParallelConfig(
                use_distributed_optimizer=overlap,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap,
                ddp_bucket_size=size,
            )
            check_equal(run(ranks, Case(2, 1, data, BF16)), first)


def reference(
    case: Case, *, bf16: bool, moments: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """The run in fp64 of one process, written out; with `bf16`, the roundings that the method has:
    parameters and each micro-batch's gradient. moments: formats of m and v between steps."""
    kept = moments or {}
    main = {name: values(name, 0).double() for name in WHOLES}

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.bfloat16().double() if bf16 else tensor

    main = {name: rounded(value) for name, value in main.items()}
    m = {name: torch.zeros_like(value) for name, value in main.items()}
    v = {name: torch.zeros_like(value) for name, value in main.items()}
    for step in range(1, STEPS + 1):
        grads = {}
        for name, value in main.items():
            seen = rounded(value)
            salts = [values(name, step * 100 + k).double() for k in range(NUM_MICROBATCHES)]
            terms = [(rounded(salt) + seen * 0.25) / NUM_MICROBATCHES for salt in salts]
            grads[name] = torch.stack([rounded(term) for term in terms]).sum(0)
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        factor = min(1.0, case.optimizer.clip_grad / (norm + 1e-6))
        for name, g in grads.items():
            g = g * factor
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            decay = 0.0 if main[name].ndim == 1 else 0.02 * step
            is_decoupled = case.optimizer.decoupled_lr is not None and "embeddings" in name
            rate = (0.3 if is_decoupled else 0.1) / step
            root = (v[name] / (1 - 0.999**step)).sqrt() + 1e-8
            main[name] *= 1 - rate * decay
            main[name] -= rate * (m[name] / (1 - 0.9**step)) / root
            for which, held in (("m", m), ("v", v)):
                if kept.get(which) == "bf16":
                    held[name] = held[name].bfloat16().double()
    return main


@pytest.mark.parametrize("decoupled_lr", [None, 0.3])
def test_fp32_is_the_formula(decoupled_lr: float | None) -> None:
    config = OptimizerConfig(lr=0.1, clip_grad=5.0, decoupled_lr=decoupled_lr)
    case = Case(optimizer=config)
    found = wholes_of([run_case(case)])
    for name, expected in reference(case, bf16=False).items():
        torch.testing.assert_close(found[name].double(), expected, **FP32_UPDATE)


def test_bf16_keeps_its_parameters_in_fp32() -> None:
    case = Case(precision=BF16)
    found = wholes_of([run_case(case)])
    for name, expected in reference(case, bf16=True).items():
        main = found[f"param.{name}"]
        assert main.dtype == torch.float32
        assert torch.equal(main.bfloat16(), found[name])
        # A rounding of a gradient to 8 bits may fall the other way.
        torch.testing.assert_close(main.double(), expected, rtol=1e-3, atol=1e-3)


def narrow(precision: PrecisionConfig, first: str = "bf16", second: str = "bf16") -> Any:
    return replace(
        precision,
        use_precision_aware_optimizer=True,
        exp_avg_dtype=first,  # type: ignore[arg-type]
        exp_avg_sq_dtype=second,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("precision", [PrecisionConfig(), BF16], ids=["fp32", "bf16"])
def test_moments_in_fp32_are_todays_bits(precision: PrecisionConfig) -> None:
    asked = run_case(Case(precision=narrow(precision, "fp32", "fp32")))
    check_equal([asked], [run_case(Case(precision=precision))])


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("first", "second"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")]
)
@pytest.mark.parametrize("bf16", [False, True])
def test_moments_in_bf16_are_the_formula_rounded_after_each_step(
    first: str, second: str, bf16: bool
) -> None:
    case = Case(precision=narrow(PrecisionConfig(bf16=bf16), first, second))
    found = wholes_of([run_case(case)])
    expected = reference(case, bf16=bf16, moments={"m": first, "v": second})
    for name, value in expected.items():
        main = found.get(f"param.{name}", found[name])
        # A moment next to the middle of two bfloat16 numbers may be rounded the other way.
        torch.testing.assert_close(main.double(), value, rtol=2e-3, atol=2e-3)
        assert found[f"exp_avg.{name}"].dtype == getattr(torch, NAMES[first])
        assert found[f"exp_avg_sq.{name}"].dtype == getattr(torch, NAMES[second])
    kept = wholes_of([run_case(replace(case, precision=PrecisionConfig(bf16=bf16)))])
    assert any(not torch.equal(kept[name], found[name]) for name in WHOLES)


def test_moments_are_widened_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(precision=narrow(BF16))
    whole = run_case(case)
    monkeypatch.setattr("trainyard.optim.narrow_moments.PART", 300)
    check_equal([run_case(case)], [whole])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("precision", [narrow(BF16), FP16_GRADS], ids=["moments", "grads"])
def test_fewer_bits_are_the_same_bits_with_the_distributed_optimizer(
    ranks: RankPool, precision: PrecisionConfig
) -> None:
    plain = run(ranks, Case(2, 2, DataParallelConfig(ddp_bucket_size=300), precision))
    check_equal(run(ranks, Case(2, 2, ZERO, precision)), plain)
    pairs = ranks.run(run_in_halves, 2, Case(2, 1, OVERLAPPED, precision))
    check_equal([whole for whole, _ in pairs], [half for _, half in pairs])


def test_gradients_may_be_added_up_in_fp16() -> None:
    """Scaled, so that an overflow of their sum skips the step and lowers the scale."""
    case = Case(precision=FP16_GRADS)
    found, expected = wholes_of([run_case(case)]), wholes_of([run_case(Case(precision=FP16))])
    for name in WHOLES:
        key = f"param.{name}"
        torch.testing.assert_close(found[key], expected[key], rtol=0.02, atol=0.02)
    assert any(not torch.equal(found[f"param.{n}"], expected[f"param.{n}"]) for n in WHOLES)
    high = replace(FP16_GRADS, initial_loss_scale=2.0**20)
    outcomes = run_case(Case(precision=high)).outcomes
    assert outcomes[0].skipped
    assert outcomes[0].loss_scale == 2.0**19


def test_main_gradients_in_bf16_are_gradients_added_up_in_bf16() -> None:
    aware = replace(BF16, use_precision_aware_optimizer=True, main_grads_dtype="bf16")
    reduced = replace(BF16, grad_reduce_in_bf16=True)
    check_equal([run_case(Case(precision=aware))], [run_case(Case(precision=reduced))])


def test_gradients_may_be_added_up_in_bf16() -> None:
    case = Case(precision=replace(BF16, grad_reduce_in_bf16=True))
    found, expected = wholes_of([run_case(case)]), reference(case, bf16=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[f"param.{name}"].double(), value, rtol=0.05, atol=0.05)


def test_a_constant_divisor_divides() -> None:
    plain = Case(optimizer=OptimizerConfig(lr=0.1, clip_grad=0.0, optimizer="sgd"))
    halved = run_case(replace(plain, divisor=4.0))
    assert halved.outcomes[0].grad_norm == run_case(plain).outcomes[0].grad_norm / 4.0


@pytest.mark.few_cases(1)
@pytest.mark.distributed
@pytest.mark.parametrize("data", [DataParallelConfig(), ZERO], ids=["plain", "distributed"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    ranks: RankPool, data: DataParallelConfig
) -> None:
    case = Case(2, 2, data, FP16, bad_steps=(1, 2))
    results = run(ranks, case)
    alone = run_case(replace(case, dp=1, tp=1, data=DataParallelConfig()))
    for result in [*results, alone]:
        skipped = [outcome.skipped for outcome in result.outcomes]
        assert skipped == [True, True, False, False]
        scales = [outcome.loss_scale for outcome in result.outcomes]
        assert scales == [2.0**11, 2.0**10, 2.0**10, 2.0**11]
    for one, other in zip(results[0].outcomes[2:], alone.outcomes[2:], strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


def test_without_a_scale_nothing_is_updated_either() -> None:
    result = run_case(Case(bad_steps=(4,)))
    assert [outcome.skipped for outcome in result.outcomes] == [False, False, False, True]
    assert not math.isfinite(result.outcomes[-1].grad_norm)
    assert all(bool(tensor.isfinite().all()) for tensor in wholes_of([result]).values())


@pytest.mark.distributed
def test_zeros_are_counted_over_all_ranks_once(ranks: RankPool) -> None:
    case = Case(blank=("layers.0.fc2.weight", "layers.1.odd", "layers.0.norm.weight"))
    expected = 16 * 12 + 3 * 5 * 7 + 16
    assert run_case(case).outcomes[0].num_zeros == expected
    for data in (DataParallelConfig(), ZERO):
        for result in run(ranks, replace(case, dp=2, tp=2, data=data)):
            assert result.outcomes[0].num_zeros == expected


@pytest.mark.few_cases(2)
@pytest.mark.distributed
@pytest.mark.parametrize("precision", [PrecisionConfig(), BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("data", [DataParallelConfig(), OVERLAPPED], ids=["plain", "distributed"])
def test_state_continues_bit_for_bit(
    ranks: RankPool, data: DataParallelConfig, precision: PrecisionConfig
) -> None:
    pairs = ranks.run(run_in_halves, 2, Case(2, 1, data, precision))
    check_equal([whole for whole, _ in pairs], [half for _, half in pairs])
