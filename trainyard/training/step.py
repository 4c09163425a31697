"""One optimizer step, and one measurement of the validation loss.

The loss of a step is Megatron-LM's: the mean over the tokens of each micro-batch, then over
micro-batches and ranks; with `per_token`, the mean over all tokens of the step. What is reported is
always the latter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainyard.datasets.loader import Batch
from trainyard.errors import DataError
from trainyard.models.attention import document_mask
from trainyard.models.gpt import GPTModel
from trainyard.optim.adamw import AdamW
from trainyard.optim.clip import clip_to_norm, global_norm
from trainyard.parallel.data import GradientBuckets, all_reduce_sum
from trainyard.parallel.groups import ProcessGroups
from trainyard.training.batch_size import BatchSize
from trainyard.training.randomness import seed_microbatch

Forward = Callable[[Batch], Tensor]
"""A batch on the model's device to the loss of each of its tokens, (b, s) fp32, not masked."""


@dataclass(frozen=True, slots=True)
class GPTForward:
    """The losses of a GPT on a batch; where samples carry document bounds (`cu_seqlens`), no token
    attends to another document."""

    model: GPTModel
    own_positions: bool = False
    """Samples count positions in their own way; otherwise from 0, which costs less."""

    def __call__(self, batch: Batch) -> Tensor:
        """(b, s) cross entropy of each label."""
        positions = batch["position_ids"] if self.own_positions else None
        bounds = batch.get("cu_seqlens")
        mask = None if bounds is None else document_mask(bounds)
        return self.model.loss(batch["tokens"], batch["labels"], positions, mask)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to, equal on all ranks."""

    lm_loss: float
    grad_norm: float
    stop: bool
    """Some rank was asked to stop."""


class Trainee:
    """A model in training: what a step needs, and nothing of where batches come from."""

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        optimizer: AdamW,
        groups: ProcessGroups,
        batch_size: BatchSize,
        *,
        seed: int,
        clip_grad: float,
        per_token: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.groups = groups
        self.batch_size = batch_size
        self.device = next(model.parameters()).device
        self._forward = forward
        self._seed = seed
        self._clip_grad = clip_grad
        self._per_token = per_token
        self._buckets = GradientBuckets(list(optimizer.parameters.values()), groups.dp)

    def step(
        self,
        number: int,
        batches: Iterator[Batch],
        learning_rate: float,
        weight_decay: float,
        stop: bool = False,
    ) -> StepResult:
        """Take the micro-batches of step `number` from `batches` and update the parameters.

        stop: this rank was asked to stop; all learn of it with the loss, at no extra cost."""
        self.model.train()
        self._buckets.zero()
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        totals[2] = float(stop)
        for index in range(self.batch_size.num_microbatches):
            place = index * self.groups.dims.dp + self.groups.dp_rank
            seed_microbatch(self._seed, number, place)
            self._backward(to_device(next(batches), self.device), totals)
        self._buckets.reduce(average=not self._per_token)
        loss_sum, num_tokens, stops = all_reduce_sum(totals, self.groups.dp).tolist()
        grads = self.optimizer.grads
        if self._per_token:
            torch._foreach_div_(grads, max(num_tokens, 1.0))
        norm = float(global_norm(grads))
        loss = loss_sum / max(num_tokens, 1.0)
        _check_finite(number, loss, norm)
        if self._clip_grad > 0:
            clip_to_norm(grads, norm, self._clip_grad)
        self.optimizer.step(learning_rate, weight_decay)
        return StepResult(loss, norm, stops > 0)

    def _backward(self, batch: Batch, totals: Tensor) -> None:
        """Add one micro-batch to the gradients, and its loss and tokens to the totals."""
        loss, num_tokens = masked_sum(self._forward(batch), batch["loss_mask"])
        share = num_tokens.clamp(min=1.0) * self.batch_size.num_microbatches
        torch.autograd.backward(loss if self._per_token else loss / share)
        totals[0] += loss.detach()
        totals[1] += num_tokens

    @torch.no_grad()
    def evaluate(
        self,
        batches: Iterator[Batch],
        num_microbatches: int,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> float | None:
        """The mean loss over all tokens of the next micro-batches, over all ranks; draws nothing.

        None when `stop_requested` was true on some rank before the last micro-batch was begun."""
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        left = num_microbatches
        while True:
            stop, go_on = self._agree(stop_requested(), left > 0)
            if not go_on:
                break
            if stop:
                return None
            if left == 0:  # others have more
                continue
            left -= 1
            batch = to_device(next(batches), self.device)
            loss, num_tokens = masked_sum(self._forward(batch), batch["loss_mask"])
            totals[0] += loss
            totals[1] += num_tokens
        loss_sum, tokens = all_reduce_sum(totals, self.groups.dp).tolist()
        return float(loss_sum / max(tokens, 1.0))

    def _agree(self, *flags: bool) -> list[bool]:
        """Which of the flags are true on some rank."""
        if self.groups.dp is None:
            return list(flags)
        counts = torch.tensor(flags, dtype=torch.float32, device=self.device)
        return [count > 0 for count in all_reduce_sum(counts, self.groups.dp).tolist()]


def masked_sum(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the losses that count, and how many do; both (), fp32. losses, mask: (b, s)."""
    return (losses * mask).sum(), mask.sum()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch where the model is."""
    return {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}


def _check_finite(number: int, loss: float, norm: float) -> None:
    if math.isfinite(loss) and math.isfinite(norm):
        return
    raise DataError(
        f"step {number}: loss {loss}, gradient norm {norm}: training has diverged and the step was "
        "not taken; lower --lr, lengthen --lr-warmup-iters or lower --clip-grad, and continue "
        "from the last checkpoint or start again"
    )
