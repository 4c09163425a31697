"""Loads the model that the options of a stage name, on every rank of its launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from trainyard.inference.config import LayoutConfig
from trainyard.inference.load import ModelOnRanks, load_on_ranks
from trainyard.parallel.device import resolve_device
from trainyard.parallel.groups import process_groups
from trainyard.parallel.launcher import rank_of_environment


class ModelOptions(Protocol):
    """What it reads of the options of a stage."""

    @property
    def load(self) -> str | None:
        """A checkpoint; the options have seen to it that there is one."""

    @property
    def device(self) -> str:
        """auto, cpu or cuda."""

    @property
    def bf16(self) -> bool:
        """Whether weights are bf16."""

    @property
    def fp16(self) -> bool:
        """Whether they are fp16; without both, fp32."""

    @property
    def layout(self) -> LayoutConfig:
        """How many ranks share the model."""

    @property
    def expect(self) -> Sequence[str]:
        """Options that the model must have."""


@contextmanager
def model_on_ranks(options: ModelOptions) -> Iterator[ModelOnRanks]:
    """This rank's part of the model, and the groups that it is in, until the end of the block."""
    _, _, local_rank, _ = rank_of_environment()
    device = resolve_device(options.device, local_rank)
    assert options.load is not None, "the options see to it"
    with process_groups(options.layout.parallel(), device) as groups:
        dtype = torch.bfloat16 if options.bf16 else torch.float16 if options.fp16 else torch.float32
        yield load_on_ranks(
            options.load,
            device,
            dtype=dtype,
            layout=options.layout,
            groups=groups,
            expect=options.expect,
        )
