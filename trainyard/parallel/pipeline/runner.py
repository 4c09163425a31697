"""Micro-batches through the stages of a model: forward and backward of a step on this rank.

Knows nothing of what a stage computes: `forward_step` does. All ranks of a pipeline read the same
batches, as stages in the middle need positions and document bounds too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from trainyard.parallel.pipeline.outputs import backward_from, can_free, free_output
from trainyard.parallel.pipeline.p2p import PipelineLinks
from trainyard.parallel.pipeline.program import programs
from trainyard.parallel.pipeline.schedule import Action
from trainyard.parallel.timing import Timed, untimed

B = TypeVar("B")

ForwardStep = Callable[[int, nn.Module, Tensor | None, int, B], Tensor]
"""(chunk, its module, hidden or None on the first stage, micro-batch, its batch) to what the next
stage takes; on the last stage the scaled loss, (), in evaluation any tensor."""


def _nothing(chunk: int) -> None:
    pass


FULL = Fraction(1)
"""Of a micro-batch that has all of its samples."""


class PipelineRunner(Generic[B]):
    """Runs steps on the chunks that a rank holds, by a schedule that all ranks know."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        forward_step: ForwardStep[B],
        links: PipelineLinks | None = None,
        *,
        group_size: int | None = None,
        before_last_backward: Callable[[int], None] = _nothing,
        deallocate_outputs: bool = True,
        timed: Timed = untimed,
    ) -> None:
        """links: to the other ranks; None: there are none, and one chunk is the whole model.

        group_size: --microbatch-group-size-per-virtual-pipeline-stage. before_last_backward: called
        with a chunk when its last micro-batch of a step is about to go back: with it the gradients
        are whole and may be reduced. deallocate_outputs: free what was sent on; backward needs only
        where it came from. timed: around each backward pass."""
        assert links is not None or len(chunks) == 1
        self._chunks = list(chunks)
        self._forward_step = forward_step
        self._links = links
        self._group_size = group_size
        self._before_last_backward = before_last_backward
        self._deallocate = deallocate_outputs
        self._timed = timed

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage."""
        return self._links is None or self._links.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and so the losses."""
        return self._links is None or self._links.rank == self._links.pp - 1

    def train(self, batches: Iterable[B], num_microbatches: int) -> list[Tensor]:
        """Forward and backward of the next `num_microbatches` batches; gradients add up.

        Returns the loss of each micro-batch, detached, on the last stage; elsewhere nothing."""
        batches = iter(batches)
        if self._links is None:
            return self._train_alone(batches, num_microbatches)
        return self._run(self._links, batches, num_microbatches, forward_only=False)

    def evaluate(
        self, batches: Iterable[B], num_microbatches: int, filled: Fraction = FULL
    ) -> list[Tensor]:
        """Forward alone; what `forward_step` made of each micro-batch, on the last stage.

        filled: the share of its samples that each micro-batch has."""
        batches = iter(batches)
        with torch.no_grad():
            if self._links is not None:
                with self._links.filled(filled):
                    return self._run(self._links, batches, num_microbatches, forward_only=True)
            (module,) = self._chunks
            return [
                self._forward_step(0, module, None, index, next(batches))
                for index in range(num_microbatches)
            ]

    def _train_alone(self, batches: Iterator[B], num_microbatches: int) -> list[Tensor]:
        (module,) = self._chunks
        losses = []
        for index in range(num_microbatches):
            loss = self._forward_step(0, module, None, index, next(batches))
            if index == num_microbatches - 1:
                self._before_last_backward(0)
            with self._timed("backward-compute"):
                torch.autograd.backward(loss)
            losses.append(loss.detach())
        return losses

    def _run(
        self, links: PipelineLinks, batches: Iterator[B], num_microbatches: int, forward_only: bool
    ) -> list[Tensor]:
        program = programs(
            links.pp, len(self._chunks), num_microbatches, self._group_size, forward_only
        )[links.rank]
        step = _Step(self._chunks, self._forward_step, batches, keep_graph=not forward_only)
        for message in program.receives[0]:
            links.post(message)
        for index, action in enumerate(program.actions):
            needed, made = program.inputs[index], program.outputs[index]
            arrived = None if needed is None else links.take(needed)
            for message in program.receives[index + 1]:
                links.post(message)
            if program.last_backwards[index]:
                self._before_last_backward(action.chunk)
            if action.kind == "B":
                with self._timed("backward-compute"):
                    gradient = step.backward(action, arrived)
                if made is not None:
                    assert gradient is not None
                    links.send(made, gradient)
                continue
            output = step.forward(action, arrived)
            if made is None:
                step.losses[action.microbatch] = output.detach()
                continue
            links.send(made, output)
            if self._deallocate and can_free(output):
                free_output(output)
        links.finish()
        return [step.losses[index] for index in sorted(step.losses)]


class _Step(Generic[B]):
    """Tensors kept between the forward and the backward pass of a micro-batch."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        forward_step: ForwardStep[B],
        batches: Iterator[B],
        keep_graph: bool,
    ) -> None:
        self.losses: dict[int, Tensor] = {}
        self._chunks = chunks
        self._forward_step = forward_step
        self._batches = batches
        self._keep_graph = keep_graph
        self._read: dict[int, B] = {}
        self._held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """The output of a chunk; its input and its graph are kept for backward."""
        if hidden is not None and self._keep_graph:
            hidden.requires_grad_()
        batch = self._batch(action)
        output = self._forward_step(
            action.chunk, self._chunks[action.chunk], hidden, action.microbatch, batch
        )
        if self._keep_graph:
            self._held[action.microbatch, action.chunk] = hidden, output
        return output

    def backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the chunk's input; None on the first stage. gradient: of its output; None
        where that is the loss."""
        hidden, output = self._held.pop((action.microbatch, action.chunk))
        if output is hidden:  # a stage without layers
            return gradient
        if not output.requires_grad:  # a first stage whose parameters, if any, are all frozen
            return None
        if gradient is None:
            torch.autograd.backward(output)
        else:
            backward_from(output, gradient)
        return None if hidden is None else hidden.grad

    def _batch(self, action: Action) -> B:
        """Micro-batches come to the first chunk in order; a batch is kept until the last chunk."""
        if action.chunk == 0:
            self._read[action.microbatch] = next(self._batches)
        if action.chunk == len(self._chunks) - 1:
            return self._read.pop(action.microbatch)
        return self._read[action.microbatch]
