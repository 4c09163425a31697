"""One optimizer step, and one measurement of the validation loss.

`TrainModule.step` is the whole step in order: batches, forward and backward through the pipeline,
gradient reduction, the check for NaN and Inf, unscaling, clipping, the update, the result. Two thin
wrappers surround the part before the update: `check` compares the consumed samples with the
expected ones (sample_check.py), and `judge` runs that part again after a bad result (rerun.py).
loop.py asks the schedules for the batch size and the learning rate of each step.

The loss is Megatron-LM's: the mean over the tokens of each micro-batch, then over micro-batches and
data-parallel ranks. With `per_token` it is the mean over all tokens of the step, which is also the
loss that is reported. Gradients are plain sums over ranks, so the loss of a micro-batch is divided
before its backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor, nn

from trainyard.datasets.loader import Batch
from trainyard.errors import DataError
from trainyard.fp8.delayed import advance_all
from trainyard.models.fp8 import delayed_scalings
from trainyard.models.layer_sums import LayerReport, LayerSums
from trainyard.models.losses import Losses
from trainyard.models.step_module import flat_sums, step_modules
from trainyard.optim.optimizer import ModelOptimizer
from trainyard.optim.schedule import Rates
from trainyard.parallel.data.data_parallel import all_reduce_sum
from trainyard.parallel.groups import ProcessGroups
from trainyard.parallel.pipeline.runner import FULL, PipelineRunner
from trainyard.parallel.timing import Timed, untimed
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.ledger import EvaluationLosses
from trainyard.training.loop.microbatch import (
    NUM_TOKENS,
    Preparation,
    Totals,
    generator_seeds,
    is_last_chunk,
    losses_of,
    seed_generators,
)
from trainyard.training.loop.rerun import REMEDIES, StepJudge, StepSums
from trainyard.training.loop.sample_check import ConsumedSamples


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step, equal on all ranks."""

    lm_loss: float
    grad_norm: float
    stop: bool
    """Some rank was asked to stop."""
    skipped: bool = False
    """A gradient overflowed in fp16, and nothing was updated."""
    loss_scale: float = 1.0
    """The loss scale of this step."""
    num_zeros: int | None = None
    params_norm: float | None = None
    more_losses: Mapping[str, float] = field(default_factory=dict)
    """Losses beside that of the tokens, by name."""
    report: LayerReport = field(default_factory=LayerReport)
    """Sums that the layers report, such as the load of experts."""


def default_forward_step(module: nn.Module, hidden: Tensor | None, batch: Batch) -> Tensor | Losses:
    """Calls the module's own `forward_step` (microbatch.PipelineStageModule)."""
    output: Tensor | Losses = module.forward_step(hidden, batch)  # type: ignore[operator]
    return output


def _unchecked(consumed: ConsumedSamples) -> None:
    pass


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options that are the same for every step."""

    seed: int
    per_token: bool = False
    """Weigh all tokens of the step alike."""
    count_zeros: bool = False
    measure_params: bool = False
    check_finite: bool = True
    """A NaN or Inf in loss or gradient ends the run; otherwise the step is skipped."""
    timed: Timed = untimed
    """Times the parts of a step."""
    judge: StepJudge | None = None
    """Decides whether a step runs again before the update."""
    forward: Callable[[nn.Module, Tensor | None, Batch], Tensor | Losses] = default_forward_step
    more_losses: tuple[str, ...] = ()
    """Names of the losses that the model has beside that of the tokens."""
    layer_sums: LayerSums | None = None
    """What the layers of the model add up over a step."""


class TrainModule:
    """The part of a model in training that this rank holds. All ranks call the same methods at the
    same time. Knows nothing of where batches come from."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: ModelOptimizer,
        groups: ProcessGroups,
        preparation: Preparation,
        options: StepOptions,
        make_runner: Callable[[TrainModule], PipelineRunner[Batch]],
    ) -> None:
        """chunks: modules with `forward_step` (microbatch.PipelineStageModule); one, unless stages
        are virtual. make_runner: builds the pipeline that calls `forward_step`."""
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.groups = groups
        self.device = preparation.device
        self._preparation = preparation
        self._options = options
        self._step_modules = step_modules(chunks)
        self._scalings = [s for chunk in chunks for s in delayed_scalings(chunk).values()]
        self._totals = Totals(groups, self.device, options.more_losses)
        self._loss_divisor = 1.0
        self._consumed = ConsumedSamples(0, 0)
        self._runner = make_runner(self)

    # --- training -----------------------------------------------------------------------------

    def step(
        self,
        number: int,
        size: BatchSize,
        batches: Iterator[Batch],
        rates: Rates,
        stop: bool = False,
        check: Callable[[ConsumedSamples], None] = _unchecked,
    ) -> StepResult:
        """Consume the micro-batches of step `number` from `batches` and update the parameters.

        stop: this rank was asked to stop; all ranks learn of it with the loss, at no extra cost.
        check: called with the consumed samples whenever the step is computed, before any rank
        updates anything; raises an error to end the run."""
        optimizer, options = self.optimizer, self._options

        # Forward, backward and gradient reduction; the judge may run them again.
        if options.judge is None:
            sums = self._forward_backward(number, size, batches, stop, check)
        else:
            repeated = Repeated(batches)
            sums = options.judge(
                number,
                lambda: self._forward_backward(number, size, repeated.from_start(), stop, check),
            )

        # NaN or Inf ends the run here, unless fp16 may still lower its loss scale.
        loss_scale = optimizer.loss_scale
        must_be_finite = options.check_finite and not optimizer.scaler.expects_overflow
        if must_be_finite and not math.isfinite(sums.loss):
            raise diverged(number, sums.loss, math.nan)

        # Update the loss scale, skip the step on overflow, else unscale, clip and update.
        found = (sums.grad_norm, sums.num_zeros)
        with options.timed("optimizer"):
            outcome = optimizer.update(rates, divisor=sums.divisor, found=found)
        if must_be_finite and outcome.skipped:
            raise diverged(number, sums.loss, outcome.grad_norm)

        report = self._finish_layers(sums, size)
        advance_all(self._scalings, self.groups.stage)

        return StepResult(
            lm_loss=sums.loss,
            grad_norm=outcome.grad_norm,
            stop=sums.stop,
            skipped=outcome.skipped,
            loss_scale=loss_scale,
            num_zeros=outcome.num_zeros,
            params_norm=optimizer.params_norm() if options.measure_params else None,
            more_losses={**sums.more_losses, **report.losses},
            report=report,
        )

    def _finish_layers(self, sums: StepSums, size: BatchSize) -> LayerReport:
        """Hand layers what they added up, now that the step counts."""
        layers = self._options.layer_sums
        if layers is None:
            return LayerReport()
        by_layer = layers.by_layer(sums.of_layers)
        for module in self._step_modules:
            module.finish_step(by_layer[module.layer])
        return layers.report(by_layer, size.num_microbatches * size.dp)

    def _forward_backward(
        self,
        number: int,
        size: BatchSize,
        batches: Iterator[Batch],
        stop: bool,
        check: Callable[[ConsumedSamples], None],
    ) -> StepSums:
        """Forward and backward passes of a step, and the sums over ranks. Nothing is updated, so it
        can run again on the same batches."""
        optimizer, options, timed = self.optimizer, self._options, self._options.timed
        num_microbatches = size.num_microbatches
        for chunk in self.chunks:
            chunk.train()
        optimizer.zero()
        self._totals = Totals(self.groups, self.device, options.more_losses)
        self._totals.values[2].fill_(float(stop))  # an assignment would wait for the device
        self._loss_divisor = 1.0 if options.per_token else float(num_microbatches * size.dp)
        for module in self._step_modules:
            weight = optimizer.loss_scale / self._loss_divisor
            module.begin_step(weight, per_token=options.per_token)

        # Micro-batches: sample ids recorded, seeds of dropout added, on the device.
        self._consumed = ConsumedSamples(number, num_microbatches)
        recorded = self._consumed.watch(batches)
        ready = self._preparation.training(recorded, options.seed, number, num_microbatches)

        with timed("forward-backward"):  # the pipeline calls forward_step
            self._runner.train(_timed_batches(ready, timed), num_microbatches)
        with timed("all-grads-sync"):
            optimizer.reduce_gradients()
        measured = optimizer.measure(options.count_zeros)

        # Runs while the device computes, and before the sum for which all ranks wait.
        check(self._consumed)
        num_sums, totals = len(self._totals.values), self._totals.values
        if options.layer_sums is not None:
            of_layers = flat_sums(options.layer_sums, self._step_modules, self.device)
            totals = torch.cat((totals, of_layers))
        all_reduce_sum(totals, self.groups.world)
        # The only time that the host waits for the device: all figures of the step at once.
        numbers = torch.cat((totals, measured.values)).tolist()
        summed = self._totals.read(numbers[:num_sums])
        divisor = max(summed.num_tokens, 1.0) if options.per_token else 1.0
        grad_norm, num_zeros = measured.read(optimizer.loss_scale * divisor, numbers[len(totals) :])
        return StepSums(
            summed.loss,
            grad_norm,
            divisor,
            summed.stop,
            optimizer.scaler.expects_overflow or not options.check_finite,
            num_zeros,
            summed.more,
            numbers[num_sums : len(totals)],
        )

    def forward_step(
        self, chunk: int, module: nn.Module, hidden: Tensor | None, index: int, batch: Batch
    ) -> Tensor:
        """One chunk of one micro-batch, called by the pipeline. The last chunk returns the scaled
        loss in training and the sum of losses in evaluation."""
        if module.training:
            seed_generators(batch, self.groups.tp_rank, self.groups.cp_rank, chunk)
            self._consumed.seeds[chunk, index] = generator_seeds()
        timed = self._options.timed if module.training else untimed
        with timed("forward-compute"):
            output = self._options.forward(module, hidden, batch)
        if not is_last_chunk(module):
            assert isinstance(output, Tensor)
            return output
        losses = losses_of(output)
        loss = (losses.of_tokens * batch["loss_mask"]).sum()  # (b, s_local) losses to () fp32
        num_tokens = batch[NUM_TOKENS]
        self._totals.add(loss.detach(), num_tokens, losses.means)
        if not module.training:
            return loss
        if not self._options.per_token:
            loss = loss / (num_tokens.clamp(min=1.0) * self._loss_divisor)
        for name in self._options.more_losses:
            more = losses.weighed(name, per_token=self._options.per_token)
            loss = loss + more / self._loss_divisor
        scale = self.optimizer.loss_scale
        return loss if scale == 1.0 else loss * scale

    # --- evaluation ---------------------------------------------------------------------------

    def evaluate(
        self,
        batches: Iterator[Batch],
        num_microbatches: int,
        stop_requested: Callable[[], bool] = lambda: False,
        at_once: int = 1,
        last_filled: Fraction = FULL,
    ) -> EvaluationLosses | None:
        """The losses over the next micro-batches, over all ranks. Draws no random numbers.

        at_once: micro-batches that pass a pipeline together. last_filled: the share of its samples
        that the last one has; if it has not all, it passes a pipeline alone. None when
        `stop_requested` was true on some rank before the last micro-batch began."""
        self.optimizer.finish_parameters()
        for chunk in self.chunks:
            chunk.eval()
        self._totals = Totals(self.groups, self.device, self._options.more_losses)
        left = num_microbatches
        while True:
            stop, any_left = self._any_rank(stop_requested(), left > 0)
            if not any_left:
                break
            if stop:
                return None
            count = min(left, at_once if self.groups.pp is not None else 1)
            if count == 0:  # other ranks have more
                continue
            filled = FULL
            if count == left and last_filled != FULL:
                count, filled = (count - 1, FULL) if count > 1 else (1, last_filled)
            left -= count
            ready = (self._preparation.ready(next(batches)) for _ in range(count))
            self._runner.evaluate(ready, count, filled)
        all_reduce_sum(self._totals.values, self.groups.world)
        summed = self._totals.read(self._totals.values.tolist())
        return EvaluationLosses(summed.loss, summed.more)

    def _any_rank(self, *flags: bool) -> list[bool]:
        """Which of the flags are true on some rank."""
        if self.groups.world is None:
            return list(flags)
        counts = torch.tensor(flags, dtype=torch.float32, device=self.device)
        return [count > 0 for count in all_reduce_sum(counts, self.groups.world).tolist()]


class Repeated:
    """Batches that can be read again: each comes from the loader once, and stays on the host until
    the step is over."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._kept: list[Batch] = []

    def from_start(self) -> Iterator[Batch]:
        """All batches from the first one."""
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
    """The error for a step whose loss or gradient is NaN or Inf."""
    return DataError(
        f"step {number}: loss {loss}, gradient norm {norm}: training has diverged and the "
        f"parameters were not updated; {REMEDIES}, and continue from the last checkpoint or start "
        "again"
    )
