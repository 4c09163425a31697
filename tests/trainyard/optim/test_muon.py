"""Muon: laws of orthogonalising, and steps equal to formulas however matrices are cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.trainyard.optim.sharded_parameters import (
    NUM_MICROBATCHES,
    STEPS,
    WHOLES,
    Case,
    run_case,
    run_in_halves,
    values,
    wholes_of,
)
from tests.trainyard.optim.test_optimizer import (
    BF16,
    OVERLAPPED,
    ZERO,
    check_close,
    check_equal,
    run,
)
from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.groups import is_hidden_matrix
from trainyard.optim.muon import Muon
from trainyard.optim.newton_schulz import COEFFICIENTS, orthogonalize, update_scale
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.parallel.sharding import (
    Shard,
    even_cut,
    even_shard,
    mark_expert,
    mark_interleaved,
    mark_shard,
)
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_UPDATE
from trainyard.training.options.optimizer_checks import check_optimizer

MUON = OptimizerConfig(lr=0.1, clip_grad=5.0, optimizer="muon", muon_use_nesterov=True)
MATRICES = ("layers.0.fc1.weight", "layers.0.fc2.weight")


@dataclass(frozen=True)
class Alone:
    """The groups of one process."""

    tp: Any = None
    expert_tp: Any = None


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- orthogonalising ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (3, 8, 8)])
def test_singular_values_become_one_and_their_vectors_stay(shape: tuple[int, ...]) -> None:
    x = draw(*shape)
    found = orthogonalize(x, 10)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    reached = (u.mT @ found @ v.mT).diagonal(dim1=-2, dim2=-1)
    assert bool(((reached > 0.8) & (reached < 1.2)).all())
    torch.testing.assert_close(u @ torch.diag_embed(reached) @ v, found, rtol=1e-4, atol=1e-4)
    assert float(s.max() / s.min()) > 2  # or it would say little


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_steps_are_the_polynomials(kind: Any) -> None:
    x = draw(6, 9)
    s = torch.linalg.svdvals(x.double() / x.double().norm())
    for step in range(7):
        a, b, c = COEFFICIENTS[kind][step % len(COEFFICIENTS[kind])]
        s = a * s + b * s**3 + c * s**5
    found = torch.linalg.svdvals(orthogonalize(x, 7, kind).double())
    torch.testing.assert_close(found, s.abs().sort(descending=True)[0], rtol=1e-4, atol=1e-4)


def test_it_turns_with_its_argument_and_ignores_its_length() -> None:
    x, turn = draw(8, 12), torch.linalg.qr(draw(8, 8, seed=1))[0]
    found = orthogonalize(x, 5)
    torch.testing.assert_close(orthogonalize(turn @ x, 5), turn @ found, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(orthogonalize(1e-3 * x, 5), found, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(orthogonalize(x.mT, 5), found.mT)
    assert torch.equal(orthogonalize(torch.zeros(3, 4), 5), torch.zeros(3, 4))


def test_spectral_steps_have_numbers_of_size_one_whatever_the_shape() -> None:
    for shape in ((64, 64), (16, 96), (96, 16)):
        step = orthogonalize(draw(*shape), 10) * update_scale(*shape, "spectral")
        assert float(step.square().mean().sqrt()) == pytest.approx(1.0, abs=0.1)
    assert update_scale(9, 4, "unit_rms_norm") == 1.5
    assert update_scale(4, 9, "unit_rms_norm") == pytest.approx(2 / 3)
    assert update_scale(9, 4, "shape_scaling") == 1.5
    assert update_scale(4, 9, "shape_scaling") == 1.0


# --- what a parameter is made of ----------------------------------------------------------------


def test_queries_keys_and_values_are_matrices_of_their_own() -> None:
    q, k, v = draw(12, 10, seed=1), draw(4, 10, seed=2), draw(4, 10, seed=3)

    def fused(parts: list[Tensor]) -> Tensor:
        """Two query groups of three heads of two numbers, each with its key and value."""
        blocks = [part.unflatten(0, (2, -1)) for part in parts]
        return torch.cat(blocks, dim=1).flatten(0, 1)

    parameter = nn.Parameter(fused([q, k, v]))
    mark_interleaved(parameter, (6, 2, 2))
    muon = Muon(MUON, Alone())
    single = [muon.direction(nn.Parameter(part), part) for part in (q, k, v)]
    found = muon.direction(parameter, parameter.detach())
    torch.testing.assert_close(found, fused(single))
    together = Muon(replace(MUON, muon_split_qkv=False), Alone())
    plain = nn.Parameter(parameter.detach().clone())
    assert torch.equal(
        together.direction(parameter, parameter.detach()), muon.direction(plain, plain.detach())
    )


def test_each_expert_is_a_matrix() -> None:
    stacked = nn.Parameter(draw(3, 8, 6))
    mark_expert(stacked)
    muon = Muon(MUON, Alone())
    found = muon.direction(stacked, stacked.detach())
    for expert, matrix in zip(found, stacked.detach(), strict=True):
        torch.testing.assert_close(expert, muon.direction(nn.Parameter(matrix), matrix))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", (4, 4), True),
        ("decoder.layers.0.mlp.linear_fc1.bias", (4,), False),
        ("decoder.layers.0.mlp.experts.linear_fc1.bias", (2, 4), False),
        ("decoder.layers.0.conv.weight", (4, 1, 3), False),
        ("decoder.final_layernorm.weight", (4,), False),
        ("embedding.word_embeddings.weight", (8, 4), False),
        ("output_layer.weight", (8, 4), False),
    ],
)
def test_matrices_of_layers_are_muons(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_hidden_matrix(name, torch.zeros(shape)) is expected


# --- whole steps --------------------------------------------------------------------------------


def reference(case: Case) -> dict[str, Tensor]:
    """The run in fp64 of one process, written out."""
    main = {name: values(name, 0).double() for name in WHOLES}
    m = {name: torch.zeros_like(value) for name, value in main.items()}
    v = {name: torch.zeros_like(value) for name, value in main.items()}
    for step in range(1, STEPS + 1):
        grads = {}
        for name, value in main.items():
            salts = [values(name, step * 100 + k).double() for k in range(NUM_MICROBATCHES)]
            grads[name] = torch.stack([salt + value * 0.25 for salt in salts]).mean(0)
        norm = float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt())
        factor = min(1.0, case.optimizer.clip_grad / (norm + 1e-6))
        for name, g in grads.items():
            g = g * factor
            rate, decay = 0.1 / step, 0.0 if main[name].ndim == 1 else 0.02 * step
            main[name] *= 1 - rate * decay
            m[name] = 0.9 * m[name] + 0.1 * g
            if name in MATRICES:
                x = 0.1 * g + 0.9 * m[name]  # Nesterov's
                x = x / x.norm()
                for a, b, c in COEFFICIENTS["quintic"]:
                    gram = x @ x.T
                    x = a * x + (b * gram + c * gram @ gram) @ x
                main[name] -= rate * max(x.shape) ** 0.5 * x
            else:
                v[name] = 0.999 * v[name] + 0.001 * g * g
                root = (v[name] / (1 - 0.999**step)).sqrt() + 1e-8
                main[name] -= rate * (m[name] / (1 - 0.9**step)) / root
    return main


CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def test_a_step_is_the_formula() -> None:
    case = Case(optimizer=MUON)
    found = wholes_of([run_case(case)])
    for name, expected in reference(case).items():
        torch.testing.assert_close(found[name].double(), expected, **CLOSE)
        kinds = {key.partition(".")[0] for key in found if key.endswith(f".{name}")}
        assert kinds == ({"momentum_buffer"} if name in MATRICES else {"exp_avg", "exp_avg_sq"})


def test_the_rest_may_be_lions() -> None:
    found = wholes_of([run_case(Case(optimizer=replace(MUON, muon_scalar_optimizer="lion")))])
    assert "momentum.layers.0.norm.weight" in found
    assert "momentum_buffer.layers.0.fc1.weight" in found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("precision", [PrecisionConfig(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (4, 2)])
def test_shared_state_takes_the_plain_step_bit_for_bit(
    ranks: RankPool, dp: int, tp: int, precision: PrecisionConfig
) -> None:
    """Buckets of 300 numbers, so that pieces begin inside of matrices."""
    plain = Case(dp, tp, DataParallelConfig(ddp_bucket_size=300), precision, MUON)
    first = run(ranks, plain)
    check_equal(run(ranks, replace(plain, data=ZERO)), first)
    check_equal(run(ranks, replace(plain, data=OVERLAPPED)), first)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["duplicated", "distributed"])
def test_ranks_take_the_step_of_one_process(ranks: RankPool, mode: Any) -> None:
    muon = replace(MUON, muon_tp_mode=mode)
    alone = [run_case(Case(optimizer=muon))]
    for dp, tp, data in [(1, 2, None), (2, 2, ZERO), (2, 4, OVERLAPPED)]:
        case = Case(dp, tp, data or DataParallelConfig(), optimizer=muon)
        check_close(run(ranks, case), alone, **CLOSE)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("precision", [PrecisionConfig(), BF16], ids=["fp32", "bf16"])
def test_state_continues_bit_for_bit(ranks: RankPool, precision: PrecisionConfig) -> None:
    pairs = ranks.run(run_in_halves, 4, Case(2, 2, OVERLAPPED, precision, MUON))
    check_equal([whole for whole, _ in pairs], [half for _, half in pairs])


def directions(mode: Any) -> list[tuple[str, Tensor, Tensor]]:
    """On this rank of two: each parameter's update, and its part of the whole's."""
    groups = Alone(dist.group.WORLD, dist.group.WORLD)
    muon, alone = Muon(replace(MUON, muon_tp_mode=mode), groups), Muon(MUON, Alone())
    rank, found = dist.get_rank(), []
    for name, shard, rows in [
        ("qkv", even_shard((20, 10), 0, 2, rank), (6, 2, 2)),
        ("gated", even_shard((24, 10), 0, 2, rank, parts=2), None),
        ("columns", even_shard((10, 16), 1, 2, rank), None),
        ("experts", Shard((3, 8, 12), (even_cut((3, 8, 12), 2, 2, rank),)), None),
        ("whole", None, None),
    ]:
        whole = draw(*(shard.shape if shard else (7, 5)))
        parameter = nn.Parameter(whole if shard is None else shard.take(whole))
        original = nn.Parameter(whole)
        for one in (parameter, original):
            if name == "experts":
                mark_expert(one)
            if rows is not None:
                mark_interleaved(one, rows)
        expected = alone.direction(original, whole)
        if shard is not None:
            mark_shard(parameter, shard)
            expected = shard.take(expected)
        found.append((name, muon.direction(parameter, parameter.detach()), expected))
    return found


@pytest.mark.few_cases(1)
@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["duplicated", "distributed", "blockwise"])
def test_matrices_that_are_cut_have_the_update_of_whole_ones(ranks: RankPool, mode: str) -> None:
    for results in ranks.run(directions, 2, mode):
        for name, found, expected in results:
            if mode == "distributed":
                torch.testing.assert_close(found, expected, **FP32_UPDATE, msg=name)
            else:  # gathered in the order of one process; parts of their own are something else
                is_whole = mode == "duplicated" or name == "whole"
                assert torch.equal(found, expected) is is_whole, name


# --- refusals -----------------------------------------------------------------------------------


def test_what_muon_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="--optimizer muon and --fp16 exclude each other"):
        check_optimizer(MUON, PrecisionConfig(fp16=True))
    narrow = PrecisionConfig(use_precision_aware_optimizer=True, exp_avg_dtype="bf16")
    with pytest.raises(ConfigError, match=r"--exp-avg-dtype .* not to muon"):
        check_optimizer(MUON, narrow)
    for config in (MUON, OptimizerConfig(lr=0.1, optimizer_cpu_offload=True)):
        check_optimizer(config, PrecisionConfig(), "optim")
        with pytest.raises(ConfigError, match="-strategy optim_grads_params exclude each other"):
            check_optimizer(config, PrecisionConfig(), "optim_grads_params")
    with pytest.raises(ConfigError, match="--muon-num-ns-steps must be at least 1"):
        replace(MUON, muon_num_ns_steps=0)
    with pytest.raises(ConfigError, match=r"--muon-momentum must be in \[0, 1\)"):
        replace(MUON, muon_momentum=1.0)
