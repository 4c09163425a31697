"""A toy model in stages: a stack of linear layers with a nonlinearity, and a squared loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainyard.parallel.pipeline.partition import Partition, StageLayers, arrange, stages_in_order
from trainyard.parallel.pipeline.runner import ForwardStep

SEQUENCE, BATCH, WIDTH = 3, 2, 5
SHAPE = (SEQUENCE, BATCH, WIDTH)

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""


class Stack(nn.Module):
    """The layers of one stage, under their numbers in the whole."""

    def __init__(self, stage: StageLayers) -> None:
        super().__init__()
        self.stage = stage
        self.layers = nn.ModuleDict({str(number): layer(number) for number in stage.layers})

    def forward(self, hidden: Tensor) -> Tensor:
        for module in self.layers.values():
            hidden = hidden + torch.tanh(module(hidden))
        return hidden


def layer(number: int) -> nn.Linear:
    torch.manual_seed(number)
    return nn.Linear(WIDTH, WIDTH)


def batches(count: int, order: list[int] | None = None) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    made = [
        (torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator))
        for _ in range(count)
    ]
    return [made[i] for i in order] if order else made


def forward_step(seen: list[tuple[int, int]] | None = None) -> ForwardStep[Batch]:
    def step(
        chunk: int, module: nn.Module, hidden: Tensor | None, microbatch: int, batch: Batch
    ) -> Tensor:
        assert isinstance(module, Stack)
        assert (hidden is None) == module.stage.has_embedding
        if seen is not None:
            seen.append((microbatch, chunk))
        output: Tensor = module(batch[0] if hidden is None else hidden)
        return ((output - batch[1]) ** 2).mean() if module.stage.has_output else output

    return step


def gradients(modules: list[Stack]) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def even(pp: int, chunks: int, layers_per_stage: int = 1) -> Partition:
    return arrange([layers_per_stage] * (pp * chunks), pp)


def whole(split: Partition) -> Stack:
    layers = sum(len(stage.layers) for stage in stages_in_order(split))
    return Stack(StageLayers(range(layers), has_embedding=True, has_output=True))
