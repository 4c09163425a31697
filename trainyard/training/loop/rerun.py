"""Reruns a step to find the cause of an impossible result: a faulty machine, or model and data.

The forward and backward pass of a step is a pure function of weights, samples and seeds. So a loss
or gradient that is NaN or Inf (or jumps, with --check-for-spiky-loss) is computed again on the same
ranks:

    another result       a transient fault of the machine, now or before
    the same result      model or data, or a machine with a permanent fault. The run ends with
                         status 16; restarted on other machines, it computes the step once more:
        another result   the first machines are faulty
        the same result  model or data: no machine is faulty

These are the rules and exit statuses of Megatron-LM's rerun state machine. A spike never ends a
run: its cause is logged, and training continues.

Kernels without a fixed order of additions differ in the last digits. NaN and Inf count as the same
result, and so do spikes that differ by no more than ROUNDING.

Every decision is a pure function of values that are equal on all ranks. Standard library only."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainyard.errors import RerunElsewhere, ValidationFailed

log = logging.getLogger(__name__)

REMEDIES = (
    "lower --lr, lengthen --lr-warmup-iters, lower --clip-grad, or pass over the step with "
    "--iterations-to-skip"
)
"""Remedies for a loss that is NaN or Inf."""

ROUNDING = 1e-3
"""Relative difference of two results of the same step on sound machines, from the order of
additions in bf16. Far below a spike (SHARE)."""

Problem = Literal["not finite", "spike"]
Action = Literal["accept", "again", "elsewhere", "fail"]


@dataclass(frozen=True, slots=True)
class StepSums:
    """Result of the forward and backward pass of a step, equal on all ranks."""

    loss: float
    grad_norm: float
    divisor: float
    """Divisor of the gradients, besides the loss scale."""
    stop: bool
    """Some rank was asked to stop."""
    expects_overflow: bool = False
    """NaN and Inf in gradients are expected (fp16), or only skip the step."""
    num_zeros: int | None = None
    """Zeros of the gradient, if they are counted."""
    more_losses: Mapping[str, float] = field(default_factory=dict)
    """Losses beside that of the tokens, by name."""
    of_layers: Sequence[float] = ()
    """What layers added up, all one behind the other."""

    def result(self) -> tuple[float, float]:
        """The values that a rerun must reproduce."""
        return self.loss, self.grad_norm


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A result that the same machines gave twice, stored for a rerun on other machines."""

    step: int
    loss: float
    grad_norm: float
    where: tuple[str, ...]
    """Machine and device of each rank."""

    def document(self) -> dict[str, Any]:
        """JSON-able; numbers in hexadecimal, which has NaN and every bit."""
        return {
            "step": self.step,
            "loss": float(self.loss).hex(),
            "grad_norm": float(self.grad_norm).hex(),
            "where": list(self.where),
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Suspicion:
        """The inverse of `document`."""
        loss, norm = (float.fromhex(document[name]) for name in ("loss", "grad_norm"))
        return cls(int(document["step"]), loss, norm, tuple(document["where"]))


@dataclass(frozen=True, slots=True)
class Finding:
    """The decision about a step, and the message for the log."""

    action: Action
    message: str = ""
    suspicion: Suspicion | None = None
    """To store for a run on other machines."""
    clears: bool = False
    """The stored suspicion is resolved."""


def is_finite(result: Sequence[float]) -> bool:
    """Whether no value is NaN or Inf."""
    return all(map(math.isfinite, result))


def is_next_to(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether finite results differ by no more than ROUNDING."""
    pairs = zip(one, other, strict=True)
    return all(math.isclose(a, b, rel_tol=ROUNDING) for a, b in pairs)


class RerunMachine:
    """The decisions of --rerun-mode validate_results."""

    def __init__(self, where: Sequence[str], suspicion: Suspicion | None = None) -> None:
        """where: machine and device of each rank. suspicion: of an earlier run."""
        self._where = tuple(where)
        self._suspicion = suspicion

    def first(self, step: int, result: tuple[float, float], problem: Problem | None) -> Finding:
        """The decision after the first computation of a step."""
        kept = self._suspicion
        if kept is not None and kept.step == step:
            return self._elsewhere(kept, result, problem)
        if problem is None:
            return Finding("accept")
        return Finding("again", f"step {step}: {_shown(result)}: {problem}; running it again")

    def second(
        self,
        step: int,
        before: tuple[float, float],
        after: tuple[float, float],
        problem: Problem,
    ) -> Finding:
        """The decision after the second computation. problem: of the first one."""
        if problem == "spike":
            message = (
                f"step {step}: the rerun gave the same spike: the cause is data or optimizer, not "
                "the machine (stages.blame shows the documents)"
                if is_next_to(before, after)
                else f"step {step}: {_shown(before)} at first, {_shown(after)} the second time: "
                f"transient fault of one of {_places(self._where)}; continuing with the second"
            )
            return Finding("accept", message)
        if not is_finite(after):
            return Finding(
                "elsewhere",
                f"step {step}: {_shown(after)} both times on {_places(self._where)}: training has "
                f"most likely diverged, and the parameters were not updated; {REMEDIES}. Or the "
                "machine is faulty: the same command on other machines reruns this step and finds "
                "out",
                Suspicion(step, *after, self._where),
            )
        return Finding(
            "fail",
            f"step {step}: {_shown(before)} at first and {_shown(after)} the second time, from the "
            f"same inputs: a transient fault of one of {_places(self._where)}. The parameters "
            "were not updated; start the same command without that machine",
        )

    def _elsewhere(
        self, kept: Suspicion, result: tuple[float, float], problem: Problem | None
    ) -> Finding:
        shared = set(kept.where) & set(self._where)
        if problem != "not finite":
            message = (
                f"step {kept.step}: {_shown((kept.loss, kept.grad_norm))} on {_places(kept.where)} "
                f"and {_shown(result)} now: one of those machines is faulty; continuing"
            )
            return Finding("accept", message + ("" if shared else " without them"), clears=True)
        if shared:
            return Finding(
                "elsewhere",
                f"step {kept.step}: {_shown(result)} again, on some of the same machines "
                f"({_places(sorted(shared))}). Training has most likely diverged; {REMEDIES}. Only "
                "the same command on other machines can show whether these are faulty",
                kept,
            )
        return Finding(
            "fail",
            f"step {kept.step}: {_shown(result)} on {_places(kept.where)} and on "
            f"{_places(self._where)} alike: the cause is the model or its data, not a machine; "
            f"{REMEDIES}",
            clears=True,
        )


def _shown(result: tuple[float, float]) -> str:
    return f"loss {result[0]:.9g}, gradient norm {result[1]:.9g}"


def _places(where: Sequence[str]) -> str:
    names = sorted(set(where))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


# --- the judge that a step calls --------------------------------------------------------------


@dataclass
class StepJudge:
    """Runs the forward and backward pass of a step, and again if its result is suspicious."""

    machine: RerunMachine | None
    """None: report_determinism_stats."""
    spikes: SpikeDetector | None = None
    """If spikes are rerun too (--check-for-spiky-loss)."""
    keep: Callable[[Suspicion | None], None] = lambda suspicion: None
    """Stores a suspicion for the next run, or removes it."""
    is_first_rank: bool = True
    differences: list[float] = field(default_factory=list)
    """report_determinism_stats: relative differences between two results of each step."""

    def __call__(self, step: int, compute: Callable[[], StepSums]) -> StepSums:
        """The accepted result of the step. Raises RerunElsewhere or ValidationFailed."""
        first = compute()
        if self.machine is None:
            second = compute()
            self.differences.append(_difference(first.loss, second.loss))
            return second
        problem = self._problem(first)
        finding = self.machine.first(step, first.result(), problem)
        sums = first
        if finding.action == "again":
            self._log(finding)
            sums = compute()
            assert problem is not None
            finding = self.machine.second(step, first.result(), sums.result(), problem)
        self._conclude(finding)
        if self.spikes is not None:
            self.spikes.add(sums.loss)
        return sums

    def _problem(self, sums: StepSums) -> Problem | None:
        if not is_finite(sums.result()):
            return None if sums.expects_overflow else "not finite"
        return "spike" if self.spikes is not None and self.spikes.is_spike(sums.loss) else None

    def _conclude(self, finding: Finding) -> None:
        if finding.suspicion is not None:
            self.keep(finding.suspicion)
        elif finding.clears:
            self.keep(None)
        if finding.action == "elsewhere":
            raise RerunElsewhere(finding.message)
        if finding.action == "fail":
            raise ValidationFailed(finding.message)
        self._log(finding)

    def _log(self, finding: Finding) -> None:
        if finding.message and self.is_first_rank:
            log.error("%s", finding.message)

    def report(self) -> str:
        """The result of report_determinism_stats in one line."""
        unequal = [difference for difference in self.differences if difference > 0.0]
        worst = max(unequal, default=0.0)
        return (
            f"determinism: {len(self.differences)} steps were run twice, {len(unequal)} gave "
            f"another loss; largest difference {worst:.3g} of the loss"
        )


def _difference(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


WINDOW = 128
"""Number of losses that a new one is compared with."""
FEWEST = 16
"""The fewest losses to compare with; before that, no loss counts as a spike."""
DEVIATIONS = 8.0
SHARE = 0.1
"""A spike exceeds the median by DEVIATIONS standard deviations and by SHARE of the median."""
MAD_TO_DEVIATION = 1.4826
"""From median absolute deviation to standard deviation of a normal distribution; the median ignores
earlier spikes."""


class SpikeDetector:
    """Compares each loss with the ones before it."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def bound(self) -> float:
        """Upper bound of the next loss."""
        if len(self._losses) < FEWEST:
            return math.inf
        middle = statistics.median(self._losses)
        spread = statistics.median(abs(loss - middle) for loss in self._losses)
        return middle + max(DEVIATIONS * MAD_TO_DEVIATION * spread, SHARE * abs(middle))

    def is_spike(self, loss: float) -> bool:
        """Whether this loss exceeds the bound."""
        return math.isfinite(loss) and loss > self.bound()

    def add(self, loss: float) -> None:
        """Add the loss of a step."""
        if math.isfinite(loss):
            self._losses.append(loss)
