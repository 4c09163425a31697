"""Tensors of a model in training by their names in checkpoints, and the part on this rank.

model.NAME               a weight, in the type of the run
optimizer.param.NAME     its fp32 main parameter, in 16-bit runs
optimizer.exp_avg.NAME   optimizer.exp_avg_sq.NAME: Adam's moments"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainyard.checkpoint.layout import LocalTensors, ShardedTensor
from trainyard.checkpoint.load import Restorable, restore
from trainyard.models.tied import copy_of
from trainyard.parallel.groups import gather_objects
from trainyard.parallel.sharding import held_part, rows_held
from trainyard.training.loop.step import TrainModule
from trainyard.training.run.repadding import Repadding


def model_tensors(
    chunks: Sequence[nn.Module],
    *,
    buffers_apart: bool = False,
    to_fill: bool = False,
) -> dict[str, LocalTensors]:
    """`model.NAME` of every weight on this rank; a tied copy has the name of its original.

    buffers_apart: copy buffers, which a forward pass may change; the rest is live memory, but for
    16-bit weights that are fully sharded: they are copies of what is kept in fp32. to_fill: this
    too is live memory, in fp32."""
    held: dict[str, LocalTensors] = {}
    for chunk in chunks:
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            whole_name = f"model.{copy_of(tensor) or name}"
            held.setdefault(whole_name, _parts(whole_name, tensor, buffers_apart, to_fill))
    return held


def _parts(name: str, tensor: Tensor, buffers_apart: bool, to_fill: bool) -> LocalTensors:
    local, shard = held_part(tensor)
    values = local.detach()
    if (rows := rows_held(tensor)) is not None and not to_fill:
        values = values.to(rows.dtype)
    if buffers_apart and not isinstance(tensor, nn.Parameter):
        values = values.clone()
    if shard is None:
        return values
    return [
        ShardedTensor(name, values[index], shard.shape, offset) for offset, index in shard.boxes()
    ]


def optimizer_tensors(train_module: TrainModule) -> dict[str, LocalTensors]:
    """`optimizer.KIND.NAME` of the state on this rank, as views of live memory."""
    held: dict[str, list[ShardedTensor]] = defaultdict(list)
    for box in train_module.optimizer.state_boxes():
        name = f"optimizer.{box.name}"
        held[name].append(ShardedTensor(name, box.tensor, box.global_shape, box.offset))
    return dict(held)


@dataclass(frozen=True, slots=True)
class Restoring:
    """Loads tensors from a checkpoint, together with the other ranks of a group."""

    checkpoint: Restorable
    group: ProcessGroup | None
    repadding: Repadding | None = None
    """If the checkpoint pads the vocabulary to another number of rows."""

    def fill(
        self, targets: dict[str, LocalTensors], prefix: str, names: Collection[str] | None = None
    ) -> None:
        """Load all tensors under `prefix`. A tensor that no rank holds is an error, and so is one
        that the checkpoint lacks. names: of the tensors on all ranks, if known."""
        wanted = names_over(self.group, targets) if names is None else names
        stored = targets if self.repadding is None else self.repadding.stored(targets)
        restore(self.checkpoint, stored, prefix, wanted, self.group)
        if self.repadding is not None:
            self.repadding.fill_rest(targets)


def names_over(group: ProcessGroup | None, targets: dict[str, LocalTensors]) -> set[str]:
    """The names of the tensors on all ranks of a group."""
    return {name for names in gather_objects(sorted(targets), group) for name in names}


def renamed(held: LocalTensors, name: str) -> LocalTensors:
    """The same memory under another name."""
    if isinstance(held, Tensor):
        return held
    parts = [held] if isinstance(held, ShardedTensor) else held
    return [replace(part, name=name) for part in parts]
