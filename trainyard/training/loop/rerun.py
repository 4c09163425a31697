"""Running a step again to find out who is to blame for an impossible result.

The forward and backward pass of a step is a pure function of weights, samples and seeds. So when a
loss or gradient is not finite (or jumps, with --check-for-spiky-loss) it is computed again on the
same ranks:

    another result       the machine made a mistake, now or before: a transient fault
    the same result      the model or the data, or a machine that makes it every time. The run ends
                         with status 16; started again, on other machines, it comes to the step:
        another result   the first machines are faulty
        the same result  the model or the data: no machine is to blame

as Megatron-LM's rerun state machine does, with its exit statuses. A spike never ends a run: it is
told what it was, and training goes on.

Kernels that add up in no fixed order give other last digits every time. A result that is not finite
has come out again when the second one is not finite either; a spike, when the two are next to each
other.

The decisions are pure functions of what all ranks know alike. Standard library only."""

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
"""Against a loss that is not finite."""

ROUNDING = 1e-3
"""Share by which two results of the same step may differ on sound machines: the order of additions
in bf16, far from what makes a spike (spikes.SHARE)."""

Problem = Literal["not finite", "spike"]
Action = Literal["accept", "again", "elsewhere", "fail"]


@dataclass(frozen=True, slots=True)
class StepSums:
    """What the forward and backward pass of a step came to, equal on all ranks."""

    loss: float
    grad_norm: float
    divisor: float
    """What the gradients are still to be divided by, beside the scale of the loss."""
    stop: bool
    """Some rank was asked to stop."""
    expects_overflow: bool = False
    """A gradient that is not finite is part of the method (fp16), or to be passed over."""
    num_zeros: int | None = None
    """Numbers of the gradient that are zero, where they are counted."""

    def result(self) -> tuple[float, float]:
        """What must come out again."""
        return self.loss, self.grad_norm


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A result that came out twice on the same machines, kept for other ones."""

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
        """What `document` wrote."""
        loss, norm = (float.fromhex(document[name]) for name in ("loss", "grad_norm"))
        return cls(int(document["step"]), loss, norm, tuple(document["where"]))


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to be done with a step, and what to say of it."""

    action: Action
    words: str = ""
    suspicion: Suspicion | None = None
    """To be kept for the run on other machines."""
    clears: bool = False
    """What was kept is settled."""


def is_finite(result: Sequence[float]) -> bool:
    """Whether a step can have come to that."""
    return all(map(math.isfinite, result))


def is_next_to(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether finite results differ by no more than the order of additions explains."""
    pairs = zip(one, other, strict=True)
    return all(math.isclose(a, b, rel_tol=ROUNDING) for a, b in pairs)


class RerunMachine:
    """The decisions of --rerun-mode validate_results."""

    def __init__(self, where: Sequence[str], suspicion: Suspicion | None = None) -> None:
        """where: machine and device of each rank. suspicion: what an earlier run ended with."""
        self._where = tuple(where)
        self._suspicion = suspicion

    def first(self, step: int, result: tuple[float, float], problem: Problem | None) -> Finding:
        """After a step was computed for the first time in this process."""
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
        """After it was computed again. problem: of the first time."""
        if problem == "spike":
            words = (
                f"step {step}: the spike came out again: it is the data or the optimizer, not the "
                "machine (stages.blame names the documents)"
                if is_next_to(before, after)
                else f"step {step}: {_shown(before)} at first, {_shown(after)} the second time: a "
                f"machine made a mistake (one of {_places(self._where)}); going on with the second"
            )
            return Finding("accept", words)
        if not is_finite(after):
            return Finding(
                "elsewhere",
                f"step {step}: {_shown(after)} both times on {_places(self._where)}: training has "
                f"most likely diverged, and the step was not taken; {REMEDIES}. Or the machine is "
                "at fault: the same command on other machines comes to this step again and tells",
                Suspicion(step, *after, self._where),
            )
        return Finding(
            "fail",
            f"step {step}: {_shown(before)} at first and {_shown(after)} the second time, from the "
            f"same numbers: a transient fault of one of {_places(self._where)}. The step was not "
            "taken; start the same command without that machine",
        )

    def _elsewhere(
        self, kept: Suspicion, result: tuple[float, float], problem: Problem | None
    ) -> Finding:
        shared = set(kept.where) & set(self._where)
        if problem != "not finite":
            words = (
                f"step {kept.step}: {_shown((kept.loss, kept.grad_norm))} on {_places(kept.where)} "
                f"and {_shown(result)} now: one of those machines is faulty; going on"
            )
            return Finding("accept", words + ("" if shared else " without them"), clears=True)
        if shared:
            return Finding(
                "elsewhere",
                f"step {kept.step}: {_shown(result)} again, on some of the same machines "
                f"({_places(sorted(shared))}). Training has most likely diverged; {REMEDIES}. Only "
                "the same command on other machines can tell whether these are at fault",
                kept,
            )
        return Finding(
            "fail",
            f"step {kept.step}: {_shown(result)} on {_places(kept.where)} and on "
            f"{_places(self._where)} alike: no machine is to blame but the model or its data; "
            f"{REMEDIES}",
            clears=True,
        )


def _shown(result: tuple[float, float]) -> str:
    return f"loss {result[0]:.9g}, gradient norm {result[1]:.9g}"


def _places(where: Sequence[str]) -> str:
    names = sorted(set(where))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


# --- what a step calls ------------------------------------------------------------------------


@dataclass
class StepJudge:
    """Runs the forward and backward pass of a step as often as it takes to know what to do."""

    machine: RerunMachine | None
    """None: report_determinism_stats."""
    spikes: SpikeDetector | None = None
    """Where spikes are looked into as well."""
    keep: Callable[[Suspicion | None], None] = lambda suspicion: None
    """Keep a suspicion for the next run, or forget it."""
    is_first_rank: bool = True
    differences: list[float] = field(default_factory=list)
    """report_determinism_stats: by how much results of a step differed, as a share."""

    def __call__(self, step: int, compute: Callable[[], StepSums]) -> StepSums:
        """What the step came to. Raises RerunElsewhere or ValidationFailed where it must not be
        taken."""
        first = compute()
        if self.machine is None:
            second = compute()
            self.differences.append(_difference(first.loss, second.loss))
            return second
        problem = self._problem(first)
        finding = self.machine.first(step, first.result(), problem)
        sums = first
        if finding.action == "again":
            self._tell(finding)
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
            raise RerunElsewhere(finding.words)
        if finding.action == "fail":
            raise ValidationFailed(finding.words)
        self._tell(finding)

    def _tell(self, finding: Finding) -> None:
        if finding.words and self.is_first_rank:
            log.error("%s", finding.words)

    def report(self) -> str:
        """What report_determinism_stats found, in a line."""
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
"""Losses that a new one is compared with."""
FEWEST = 16
"""Before so many were seen nothing is a spike."""
DEVIATIONS = 8.0
SHARE = 0.1
"""A spike is above the median by so many standard deviations and by this share of the median."""
MAD_TO_DEVIATION = 1.4826
"""Of a normal distribution; the median of deviations does not see earlier spikes."""


class SpikeDetector:
    """Compares each loss with those before it."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def bound(self) -> float:
        """What the next loss must not be above."""
        if len(self._losses) < FEWEST:
            return math.inf
        middle = statistics.median(self._losses)
        spread = statistics.median(abs(loss - middle) for loss in self._losses)
        return middle + max(DEVIATIONS * MAD_TO_DEVIATION * spread, SHARE * abs(middle))

    def is_spike(self, loss: float) -> bool:
        """Whether this loss, the next one, jumps."""
        return math.isfinite(loss) and loss > self.bound()

    def add(self, loss: float) -> None:
        """The loss of a step that was taken."""
        if math.isfinite(loss):
            self._losses.append(loss)
