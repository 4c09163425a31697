"""Weights of a model by their names in checkpoints, and the part on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from trainyard.checkpoint.layout import LocalTensors, ShardedTensor
from trainyard.models.tied import copy_of
from trainyard.parallel.groups import ProcessGroups, broadcast_object, gather_objects
from trainyard.parallel.sharding import held_part, rows_held


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


def names_over(groups: ProcessGroups, targets: Iterable[str]) -> set[str]:
    """The names of the tensors on all ranks. Replicas tell each other only the names by which they
    differ."""
    here = {name for names in gather_objects(sorted(targets), groups.model) for name in names}
    first = broadcast_object(here, groups.dp_cp)
    others = gather_objects(sorted(here - first), groups.dp_cp)
    return first.union(*others)
