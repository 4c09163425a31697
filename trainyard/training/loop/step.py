"""One optimizer step, and one measurement of the validation loss.

The loss of a step is Megatron-LM's: the mean over the tokens of each micro-batch, then over
micro-batches and data-parallel ranks; with `per_token`, the mean over all tokens of the step. What
is reported is always the latter. Gradients are plain sums over ranks, so each micro-batch's loss is
divided beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainyard.datasets.loader import Batch
from trainyard.errors import DataError
from trainyard.optim.optimizer import ModelOptimizer, StepOutcome
from trainyard.optim.schedule import Rates
from trainyard.parallel.data.data_parallel import all_reduce_sum
from trainyard.parallel.groups import ProcessGroups
from trainyard.parallel.pipeline.runner import PipelineRunner
from trainyard.parallel.timing import Timed, untimed
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.microbatch import (
    NUM_TOKENS,
    Preparation,
    Totals,
    is_last_chunk,
    masked_loss,
)
from trainyard.training.loop.randomness import held_seeds, seed_generators
from trainyard.training.loop.rerun import REMEDIES, StepJudge, StepSums
from trainyard.training.loop.sample_check import SampleCheck


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to, equal on all ranks."""

    lm_loss: float
    grad_norm: float
    stop: bool
    """Some rank was asked to stop."""
    skipped: bool = False
    """A gradient overflowed in fp16, and nothing was updated."""
    loss_scale: float = 1.0
    """Of this step."""
    num_zeros: int | None = None
    params_norm: float | None = None


def forward_stage(module: nn.Module, hidden: Tensor | None, batch: Batch) -> Tensor:
    """What a module makes of a micro-batch (microbatch.StageModule)."""
    output: Tensor = module.forward_stage(hidden, batch)  # type: ignore[operator]
    return output


def _unchecked(taken: SampleCheck) -> None:
    pass


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What belongs to every step alike."""

    seed: int
    per_token: bool = False
    """Weigh all tokens of the step alike."""
    count_zeros: bool = False
    measure_params: bool = False
    check_finite: bool = True
    """A loss or gradient that is not finite ends the run; otherwise the step is skipped."""
    timed: Timed = untimed
    """Around the parts of a step."""
    judge: StepJudge | None = None
    """Decides whether a step is to be run again before it is taken."""
    forward: Callable[[nn.Module, Tensor | None, Batch], Tensor] = forward_stage


class TrainModule:
    """A model in training, the part of it that this rank holds: what a step needs, and nothing of
    where batches come from. All ranks call the same methods at the same time."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: ModelOptimizer,
        groups: ProcessGroups,
        preparation: Preparation,
        options: StepOptions,
        make_runner: Callable[[TrainModule], PipelineRunner[Batch]],
    ) -> None:
        """chunks: modules with `forward_stage` (microbatch.StageModule), one unless stages are
        virtual. make_runner: what sends micro-batches through `forward_step`."""
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.groups = groups
        self.device = preparation.device
        self._preparation = preparation
        self._options = options
        self._totals = Totals(groups, self.device)
        self._loss_factor = 1.0
        self._taken = SampleCheck(0, 0)
        self._check: Callable[[SampleCheck], None] = _unchecked
        self._tp_cp_seed = (groups.tp_rank, groups.cp_rank)
        self._runner = make_runner(self)

    # --- training -----------------------------------------------------------------------------

    def step(
        self,
        number: int,
        size: BatchSize,
        batches: Iterator[Batch],
        rates: Rates,
        stop: bool = False,
        check: Callable[[SampleCheck], None] = _unchecked,
    ) -> StepResult:
        """Take the micro-batches of step `number` from `batches` and update the parameters.

        stop: this rank was asked to stop; all learn of it with the loss, at no extra cost.
        check: told what was taken, each time that the step is computed, before anything is updated
        on any rank; raises where that may not be."""
        self._check = check
        judge, timed = self._options.judge, self._options.timed
        if judge is None:
            sums = self._gradients(number, size, batches, stop)
        else:
            kept = Repeated(batches)
            sums = judge(number, lambda: self._gradients(number, size, kept.from_start(), stop))
        scale = self.optimizer.loss_scale
        must_be_finite = self._options.check_finite and not self.optimizer.scaler.expects_overflow
        if must_be_finite and not math.isfinite(sums.loss):
            raise diverged(number, sums.loss, math.nan)
        with timed("optimizer"):
            outcome = self.optimizer.update(
                rates,
                divisor=sums.divisor,
                found=(sums.grad_norm, sums.num_zeros),
            )
        if must_be_finite and outcome.skipped:
            raise diverged(number, sums.loss, outcome.grad_norm)
        return self._result(sums.loss, outcome, sums.stop, scale)

    def _gradients(
        self, number: int, size: BatchSize, batches: Iterator[Batch], stop: bool
    ) -> StepSums:
        """Forward and backward of a step, and the sums over ranks. Nothing is updated yet, so it
        can be done again with the same batches."""
        timed = self._options.timed
        self._begin_step(size, stop)
        self._taken = SampleCheck(number, size.num_microbatches)
        ready = self._preparation.training(
            self._taken.watch(batches), self._options.seed, number, size.num_microbatches
        )
        with timed("forward-backward"):
            self._runner.train(_timed_batches(ready, timed), size.num_microbatches)
        with timed("all-grads-sync"):
            self.optimizer.reduce_gradients()
        measured = self.optimizer.measure(self._options.count_zeros)
        # While the device computes, and before the sum that no rank can do without the others.
        self._check(self._taken)
        all_reduce_sum(self._totals.values, self.groups.world)
        # The host waits here, once: for all that it has to know of the step.
        numbers = torch.cat((self._totals.values, measured.values)).tolist()
        loss_sum, num_tokens, stops, *gradient = numbers
        divisor = max(num_tokens, 1.0) if self._options.per_token else 1.0
        norm, num_zeros = measured.read(self.optimizer.loss_scale * divisor, gradient)
        return StepSums(
            loss_sum / max(num_tokens, 1.0),
            norm,
            divisor,
            stops > 0,
            self.optimizer.scaler.expects_overflow or not self._options.check_finite,
            num_zeros,
        )

    def _begin_step(self, size: BatchSize, stop: bool) -> None:
        for chunk in self.chunks:
            chunk.train()
        self.optimizer.zero()
        self._totals = Totals(self.groups, self.device)
        self._totals.values[2].fill_(float(stop))  # assigned, it would wait for the device
        shares = 1 if self._options.per_token else size.num_microbatches * size.dp
        self._loss_factor = float(shares)

    def _result(self, loss: float, outcome: StepOutcome, stop: bool, scale: float) -> StepResult:
        return StepResult(
            lm_loss=loss,
            grad_norm=outcome.grad_norm,
            stop=stop,
            skipped=outcome.skipped,
            loss_scale=scale,
            num_zeros=outcome.num_zeros,
            params_norm=self.optimizer.params_norm() if self._options.measure_params else None,
        )

    def forward_step(
        self, chunk: int, module: nn.Module, hidden: Tensor | None, index: int, batch: Batch
    ) -> Tensor:
        """One chunk of one micro-batch; on the last one the scaled loss, or the sum of losses in a
        measurement. What the runner calls."""
        if module.training:
            seed_generators(batch, *self._tp_cp_seed, chunk)
            self._taken.seeds[chunk, index] = held_seeds()
        timed = self._options.timed if module.training else untimed
        with timed("forward-compute"):
            output = self._options.forward(module, hidden, batch)
        if not is_last_chunk(module):
            return output
        loss = masked_loss(output, batch)
        num_tokens = batch[NUM_TOKENS]
        self._totals.add(loss.detach(), num_tokens)
        if not module.training:
            return loss
        if not self._options.per_token:
            loss = loss / (num_tokens.clamp(min=1.0) * self._loss_factor)
        scale = self.optimizer.loss_scale
        return loss if scale == 1.0 else loss * scale

    # --- measuring ----------------------------------------------------------------------------

    def evaluate(
        self,
        batches: Iterator[Batch],
        num_microbatches: int,
        stop_requested: Callable[[], bool] = lambda: False,
        at_once: int = 1,
    ) -> float | None:
        """The mean loss over all tokens of the next micro-batches, over all ranks; draws nothing.

        at_once: micro-batches that pass a pipeline together. None when `stop_requested` was true on
        some rank before the last micro-batch was begun."""
        self.optimizer.finish_parameters()
        for chunk in self.chunks:
            chunk.eval()
        self._totals = Totals(self.groups, self.device)
        left = num_microbatches
        while True:
            stop, go_on = self._agree(stop_requested(), left > 0)
            if not go_on:
                break
            if stop:
                return None
            count = min(left, at_once if self.groups.pp is not None else 1)
            if count == 0:  # others have more
                continue
            left -= count
            ready = (self._preparation.ready(next(batches)) for _ in range(count))
            self._runner.evaluate(ready, count)
        all_reduce_sum(self._totals.values, self.groups.world)
        loss_sum, tokens, _ = self._totals.values.tolist()
        return float(loss_sum / max(tokens, 1.0))

    def _agree(self, *flags: bool) -> list[bool]:
        """Which of the flags are true on some rank."""
        if self.groups.world is None:
            return list(flags)
        counts = torch.tensor(flags, dtype=torch.float32, device=self.device)
        return [count > 0 for count in all_reduce_sum(counts, self.groups.world).tolist()]


class Repeated:
    """Batches that may be asked for again; each is taken from the loader when it is first needed,
    and kept on the host until the step is over."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._kept: list[Batch] = []

    def from_start(self) -> Iterator[Batch]:
        """The first one, those behind it, and further ones."""
        yield from self._kept
        for batch in self._batches:
            self._kept.append(batch)
            yield batch


def _timed_batches(batches: Iterator[Batch], timed: Timed) -> Iterator[Batch]:
    while True:
        with timed("batch-generator"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def diverged(number: int, loss: float, norm: float) -> DataError:
    """What to tell of a step that came to no finite number."""
    return DataError(
        f"step {number}: loss {loss}, gradient norm {norm}: training has diverged and the step was "
        f"not taken; {REMEDIES}, and continue from the last checkpoint or start again"
    )
