"""Memory-efficient cross entropy over a vocabulary that may be sharded over ranks.

Between forward and backward it keeps the logits unchanged (bf16 in mixed precision) and one fp32
number per token. The fp32 softmax exists for a few rows at a time, and the gradient overwrites the
logits. torch's own keeps fp32 log-probabilities and makes two more copies: 12 bytes a logit
more. On a GPU with Triton, kernels read the logits once forward and once backward.

Under `torch.compile` the same formulas are one fused pass, not in chunks. The forward kernel serves
there too. The backward one does not: a compiler copies what an operator overwrites, while its own
fused pass may take the memory of the logits.

Padding of the vocabulary takes no part: the sums use a narrow view of the logits, and its gradient
is zero. That needs no copy, since the kernel that writes the gradient writes the zeros as well.

N tokens, v logits of this rank for each, w <= v of which belong to tokens of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainyard.kernels.available import TRITON
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.tensor.collectives import all_reduce

CHUNK_LOGITS = 1 << 24
"""Logits that are converted to fp32 at once: 64 MiB."""


def lean_cross_entropy(
    logits: Tensor, labels: Tensor, parallel: ModelParallel, vocab_size: int | None = None
) -> Tensor:
    """See vocab.vocab_parallel_cross_entropy. logits: (s, b, v), labels: (s, b)."""
    size = logits.shape[-1]
    first = parallel.tp_rank * size
    width = size if vocab_size is None else min(max(vocab_size - first, 0), size)
    flat, local = logits.reshape(-1, size), labels.reshape(-1) - first
    losses: Tensor = _CrossEntropy.apply(flat, local, width, parallel.tp)  # type: ignore[no-untyped-call]
    return losses.view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, local: Tensor, width: int, group: ProcessGroup | None
    ) -> Tensor:
        """logits: (N, v), of which the first `width` count; local: (N), place of the label among
        them, if there. Returns (N)."""
        if has_kernels(logits):
            logits = logits.contiguous()
            highest, exponentials, of_labels = _reduced_by_kernel(logits, local, width, group)
        else:
            highest, exponentials, of_labels = _reduced(logits, local, width, group)
        log_sum = exponentials.log()
        ctx.save_for_backward(logits, local, highest + log_sum)
        ctx.width, ctx.is_spent = width, False
        losses: Tensor = log_sum - of_labels
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, local, log_norm = ctx.saved_tensors
        if torch.compiler.is_compiling():
            return _fused_gradient(logits, local, log_norm, grad, ctx.width), None, None, None
        if ctx.is_spent:
            raise RuntimeError("the logits of this cross entropy have become their gradient")
        ctx.is_spent = True
        if has_kernels(logits):
            from trainyard.kernels.cross_entropy import cross_entropy_backward

            cross_entropy_backward(logits, local, log_norm, grad, ctx.width)
            return logits, None, None, None
        real = logits.narrow(-1, 0, ctx.width)
        for rows in _chunks(real, local, log_norm, grad):
            rows[0].copy_(_gradient(*rows))
        logits.narrow(-1, ctx.width, logits.shape[-1] - ctx.width).zero_()
        return logits, None, None, None


def has_kernels(tensor: Tensor) -> bool:
    """Whether our own kernels serve tensors where this one is."""
    return TRITON and tensor.is_cuda


def _reduced_by_kernel(
    logits: Tensor, local: Tensor, width: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_reduced`: sums of this rank alone, above a maximum of its own, which are then scaled."""
    own, exponentials, of_labels = _parts_op(logits, local, width).unbind()
    highest = all_reduce(own, group, "max")
    is_here = (local >= 0) & (local < width)
    sums = torch.stack(
        (
            exponentials * (own - highest).exp(),
            (of_labels - highest).masked_fill(~is_here, 0.0),
        )
    )
    exponentials, of_labels = all_reduce(sums, group).unbind()
    return highest, exponentials, of_labels


@torch.library.custom_op("trainyard::cross_entropy_parts", mutates_args=(), device_types="cuda")
def _parts_op(logits: Tensor, local: Tensor, width: int) -> Tensor:
    from trainyard.kernels.cross_entropy import cross_entropy_parts

    return cross_entropy_parts(logits, local, width)


@_parts_op.register_fake
def _(logits: Tensor, local: Tensor, width: int) -> Tensor:
    return logits.new_empty((3, logits.shape[0]), dtype=torch.float32)


# --- in plain torch ----------------------------------------------------------------------------


def _reduced(
    logits: Tensor, local: Tensor, width: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Over the whole vocabulary, (N) fp32 each: the highest logit, the sum of exp(logit - highest),
    and the label's logit - highest, 0 if no rank has that."""
    real = logits.narrow(-1, 0, width)
    highest = all_reduce(_highest(real), group, "max")
    parts = [_sums(*chunk) for chunk in _chunks(real, local, highest)]
    exponentials, of_labels = all_reduce(torch.cat(parts), group).unbind(dim=1)
    return highest.squeeze(1), exponentials, of_labels


def _chunks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each, few enough to convert to fp32; all of them where a compiler fuses."""
    if torch.compiler.is_compiling():
        yield logits, *others
        return
    rows = max(1, CHUNK_LOGITS // max(1, logits.shape[-1]))
    yield from zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)


def _highest(logits: Tensor) -> Tensor:
    """(N, 1) fp32; logits: (N, w)."""
    if not logits.shape[-1]:  # this rank has nothing but padding
        return logits.new_full((len(logits), 1), -math.inf, dtype=torch.float32)
    if torch.compiler.is_compiling():
        # Of the same fp32 numbers, and with the same dimensions, as in `_sums`: the compiler then
        # knows the two for a softmax, whose maximum and sum it finds in one pass.
        return logits.float().amax(dim=-1, keepdim=True)
    return logits.amax(dim=-1, keepdim=True).float()


def _sums(logits: Tensor, local: Tensor, highest: Tensor) -> Tensor:
    """(N, 2) fp32: sum of exp(logit - highest), and the label's logit - highest, 0 elsewhere.

    highest: (N, 1)."""
    if not logits.shape[-1]:
        return highest.new_zeros(len(highest), 2)
    shifted = logits.float() - highest
    index, is_here = _index(local, logits.shape[-1])
    of_labels = shifted.gather(-1, index).masked_fill(~is_here.unsqueeze(-1), 0.0)
    return torch.cat((shifted.exp().sum(dim=-1, keepdim=True), of_labels), dim=1)


def _gradient(logits: Tensor, local: Tensor, log_norm: Tensor, grad: Tensor) -> Tensor:
    """(softmax - one at the label) x grad; logits: (N, w), all others (N). Returns (N, w)."""
    softmax = (logits.float() - log_norm.unsqueeze(-1)).exp()
    if softmax.shape[-1]:
        index, is_here = _index(local, logits.shape[-1])
        # Not scatter_add_: it is slow on CUDA where bits must be the same every time.
        at_label = softmax.gather(-1, index) - is_here.unsqueeze(-1).float()
        softmax.scatter_(-1, index, at_label)
    return softmax.mul_(grad.unsqueeze(-1)).to(logits.dtype)


def _fused_gradient(
    logits: Tensor, local: Tensor, log_norm: Tensor, grad: Tensor, width: int
) -> Tensor:
    """The same of all (N, v), zero behind `width`, out of what fuses into one kernel: comparisons
    with the place do, a scatter does not."""
    places = torch.arange(logits.shape[-1], device=logits.device)
    softmax = (logits.float() - log_norm.unsqueeze(-1)).exp()
    softmax = softmax - (places == local.unsqueeze(-1)).float()
    gradient = softmax * grad.unsqueeze(-1)
    if width < logits.shape[-1]:
        gradient = gradient.where(places < width, 0.0)
    return gradient.to(logits.dtype)


def _index(local: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(N, 1) place to look at, which must exist, and (N) whether the label is really there."""
    return local.clamp(0, size - 1).unsqueeze(-1), (local >= 0) & (local < size)
