"""How far a run is from the one that it should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.runs import NUM_STEPS, Run, Tensors, reference, run_of
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import BF16_LAYOUT, FP32_LAYOUT, RunTolerance, relative_error


@dataclass(frozen=True, slots=True)
class Distance:
    """Relative differences, the worst of each kind."""

    loss: float
    grad_norm: float
    gradient: float
    state: float
    where: tuple[str, str] = ("", "")
    """The worst tensor of the gradient and of the state."""

    def exceeds(self, tolerance: RunTolerance) -> list[str]:
        """What is further off than it may be, in words."""
        bounds = tolerance._asdict()
        worst = dict(zip(("gradient", "state"), self.where, strict=True))
        return [
            f"{kind} {getattr(self, kind):.1e} > {bound:.0e} {worst.get(kind, '')}".rstrip()
            for kind, bound in bounds.items()
            if not getattr(self, kind) <= bound  # NaN exceeds every bound
        ]


def tolerance_of(cut: Cut) -> RunTolerance:
    return BF16_LAYOUT if cut.bf16 else FP32_LAYOUT


def distance(found: Run, expected: Run) -> Distance:
    gradient, worst_gradient = _worst(found.gradients, expected.gradients)
    state, worst_state = _worst(found.tensors, expected.tensors)
    return Distance(
        loss=_worst_number(found.losses, expected.losses),
        grad_norm=_worst_number(found.norms, expected.norms),
        gradient=gradient,
        state=state,
        where=(worst_gradient, worst_state),
    )


def distance_to_one_process(cut: Cut, ranks: RankPool, num_steps: int = NUM_STEPS) -> Distance:
    """Run a cut, and the same in one process."""
    found = run_of(cut, ranks, num_steps)
    return distance(found, reference(cut.alone(), num_steps))


def assert_equals_one_process(cut: Cut, ranks: RankPool, num_steps: int = NUM_STEPS) -> None:
    """Losses, norms, gradients and all state after some steps, within the tolerance."""
    exceeded = distance_to_one_process(cut, ranks, num_steps).exceeds(tolerance_of(cut))
    assert not exceeded, f"{cut}: {'; '.join(exceeded)}"


def assert_same_bits(found: Run, expected: Run) -> None:
    """Nothing at all may differ."""
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert found.tensors.keys() == expected.tensors.keys()
    different = [n for n, t in found.tensors.items() if not torch.equal(t, expected.tensors[n])]
    assert not different, f"{len(different)} of {len(found.tensors)} tensors differ: {different}"


def _worst(found: Tensors, expected: Tensors) -> tuple[float, str]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max((relative_error(found[name], expected[name]), name) for name in expected)


def _worst_number(found: Sequence[float], expected: Sequence[float]) -> float:
    assert len(found) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
