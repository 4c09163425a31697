"""Micro-batches: moved to the device, sharded, seeded; and the sums of their losses.

b rows, s tokens of the whole sequence, s_local tokens of this rank under context parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trainyard.attention.masks import trim_bounds
from trainyard.datasets.loader import SAMPLE_IDS, Batch
from trainyard.models.layer_inputs import DROPOUT_SEED
from trainyard.models.losses import Losses
from trainyard.parallel.context.split import cut_sequence
from trainyard.parallel.groups import ProcessGroups
from trainyard.parallel.model import group_size
from trainyard.training.loop.seeds import generator_seed, microbatch_seed

HOST_SEED = "seed"
"""Key of a training batch: () int64 on the CPU, the seed of the micro-batch."""

NUM_SUMS = 3
"""Number of sums in `Totals`, without those of further losses."""

NUM_TOKENS = "num_tokens"
"""Key of a prepared batch: () fp32, number of tokens with a loss, over the whole sequence."""

CUT = ("tokens", "labels", "loss_mask", "position_ids")
"""Keys of (b, s) tensors, which context parallelism shards."""


BOUNDS = "cu_seqlens"
"""Key of the positions where documents start, (b, s + 1), if attention stops at them."""


class PipelineStageModule(Protocol):
    """What training asks of a model, or of the part on a pipeline stage."""

    def forward_step(self, hidden: Tensor | None, batch: Batch) -> Tensor | Losses:
        """hidden: (s, b, h) of the stage before, None on the first. Returns the hidden states for
        the next stage; on the last stage the loss of each token, (b, s_local) fp32, not masked, and
        with `Losses` further ones."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """Prepares loader batches for this rank."""

    groups: ProcessGroups
    device: torch.device
    own_positions: bool = False
    """Batches bring their position ids; otherwise the model computes them, which costs less."""

    def training(
        self, batches: Iterator[Batch], seed: int, step: int, num_microbatches: int
    ) -> Iterator[Batch]:
        """The micro-batches of a step, each with the seed of its dropout."""
        dims = self.groups.dims
        for index in range(num_microbatches):
            batch = self.ready(next(batches))
            place = index * dims.dp + self.groups.dp_rank
            drawn = microbatch_seed(seed, step, place)
            batch[HOST_SEED] = torch.tensor(drawn)
            # Filled, not copied: a copy from memory that is not pinned waits for the device.
            batch[DROPOUT_SEED] = torch.full((), drawn, dtype=torch.int64, device=self.device)
            yield batch

    def ready(self, batch: Batch) -> Batch:
        """The batch on the device, with this rank's part of the sequence."""
        if BOUNDS in batch:
            batch = {**batch, BOUNDS: trim_bounds(batch[BOUNDS])}
        moved = {
            key: tensor.to(self.device, non_blocking=True)
            for key, tensor in batch.items()
            if key != SAMPLE_IDS and (self.own_positions or key != "position_ids")
        }
        moved[NUM_TOKENS] = moved["loss_mask"].sum()
        if self.groups.cp is not None:
            size, rank = group_size(self.groups.cp), self.groups.cp_rank
            for key in CUT:
                if key in moved:
                    moved[key] = cut_sequence(moved[key], 1, size, rank)
        return moved


class Totals:
    """Sums of losses and tokens of a step or a validation, on the device."""

    def __init__(
        self, groups: ProcessGroups, device: torch.device, more: Sequence[str] = ()
    ) -> None:
        """more: names of the losses that are means over a micro-batch."""
        self._counts = groups.tp_rank == 0 and groups.is_last_stage
        self._counts_tokens = self._counts and groups.cp_rank == 0
        self._more = more
        size = NUM_SUMS + (1 + len(more) if more else 0)
        self.values = torch.zeros(size, dtype=torch.float64, device=device)
        """This rank's part of the sums: loss, tokens, requests to stop; with `more` micro-batches,
        and each of those losses."""

    def add(self, loss: Tensor, num_tokens: Tensor, means: Mapping[str, Tensor]) -> None:
        """Add one micro-batch, on one of the ranks that have the same numbers."""
        if self._counts:
            self.values[0] += loss
        if self._counts_tokens:
            self.values[1] += num_tokens
        if self._counts_tokens and self._more:
            self.values[NUM_SUMS] += 1
        if self._counts:
            for place, name in enumerate(self._more, NUM_SUMS + 1):
                self.values[place] += means[name].detach()

    def read(self, values: Sequence[float]) -> Averages:
        """Averages from the sums over all ranks of `values`."""
        loss, tokens, stops, *rest = values
        count, *sums = rest or [0.0]
        more = {name: total / max(count, 1.0) for name, total in zip(self._more, sums, strict=True)}
        return Averages(loss / max(tokens, 1.0), tokens, stops > 0, more)


class Averages(NamedTuple):
    """The figures of a step or a validation, over all ranks."""

    loss: float
    """Mean over the tokens with a loss."""
    num_tokens: float
    stop: bool
    more: dict[str, float]
    """Further losses by name, means over micro-batches."""


def losses_of(output: Tensor | Losses) -> Losses:
    """What the last chunk returned."""
    return output if isinstance(output, Losses) else Losses(output, {})


def is_last_chunk(module: nn.Module) -> bool:
    """Whether a chunk has the output layer. A module without `pipeline_stage` is a whole model."""
    pipeline_stage = getattr(module, "pipeline_stage", None)
    return pipeline_stage is None or bool(pipeline_stage.has_output)


def seed_generators(batch: Batch, tp_rank: int, cp_rank: int, chunk: int) -> None:
    """Seed the generators of the CPU and of this rank's CUDA device for one chunk of a micro-batch.

    The batch has the seed of its dropout. Tensor- and context-parallel ranks draw different
    numbers, as they hold different heads and tokens."""
    value = generator_seed(int(batch[HOST_SEED]), tp_rank, cp_rank, chunk)
    torch.default_generator.manual_seed(value)  # torch.manual_seed asks every kind of device: 2 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)


def generator_seeds() -> tuple[int, ...]:
    """The last seeds of the generators of the CPU and of this rank's CUDA device. The host knows
    both: nothing waits for the device."""
    seeds = (torch.default_generator.initial_seed(),)
    return (*seeds, torch.cuda.initial_seed()) if torch.cuda.is_initialized() else seeds
