"""Tensors of a model in training by their names in checkpoints, and the part on this rank.

model.NAME               a weight, in the type of the run
optimizer.param.NAME     its fp32 main parameter, in 16-bit runs
optimizer.exp_avg.NAME   optimizer.exp_avg_sq.NAME: Adam's moments
fp8.NAME                 scales and past maxima of a linear map (--fp8-recipe delayed)"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import Tensor

from trainyard.checkpoint.layout import LocalTensors, ShardedTensor
from trainyard.checkpoint.load import Restorable, restore
from trainyard.checkpoint.model_tensors import names_over
from trainyard.checkpoint.shared_load import LoadGroups
from trainyard.models.fp8 import delayed_scalings
from trainyard.parallel.groups import ProcessGroups
from trainyard.training.loop.step import TrainModule
from trainyard.training.run.repadding import Repadding

SCALINGS = "fp8."


def optimizer_tensors(train_module: TrainModule) -> dict[str, LocalTensors]:
    """`optimizer.KIND.NAME` of the state on this rank, as views of live memory."""
    held: dict[str, list[ShardedTensor]] = defaultdict(list)
    for box in train_module.optimizer.state_boxes():
        name = f"optimizer.{box.name}"
        held[name].append(ShardedTensor(name, box.tensor, box.global_shape, box.offset))
    return dict(held)


def scaling_tensors(train_module: TrainModule) -> dict[str, LocalTensors]:
    """`fp8.NAME` of each linear map with delayed scaling; live memory, the same on all ranks of a
    stage."""
    return {
        f"{SCALINGS}{name}": scaling.state
        for chunk in train_module.chunks
        for name, scaling in delayed_scalings(chunk).items()
    }


@dataclass(frozen=True, slots=True)
class Restoring:
    """Loads tensors from a checkpoint, together with the other ranks of a run."""

    checkpoint: Restorable
    groups: ProcessGroups
    repadding: Repadding | None = None
    """If the checkpoint pads the vocabulary to another number of rows."""

    def fill(
        self, targets: dict[str, LocalTensors], prefix: str, names: Collection[str] | None = None
    ) -> None:
        """Load all tensors under `prefix`. A tensor that no rank holds is an error, and so is one
        that the checkpoint lacks. names: of the tensors on all ranks, if known."""
        wanted = names_over(self.groups, targets) if names is None else names
        stored = targets if self.repadding is None else self.repadding.stored(targets)
        restore(self.checkpoint, stored, prefix, wanted, LoadGroups.of(self.groups))
        if self.repadding is not None:
            self.repadding.fill_rest(targets)


def renamed(held: LocalTensors, name: str) -> LocalTensors:
    """Tensors under another name, in the same memory."""
    if isinstance(held, Tensor):
        return held
    parts = [held] if isinstance(held, ShardedTensor) else held
    return [replace(part, name=name) for part in parts]
