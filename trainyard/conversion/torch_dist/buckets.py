"""Finds parameters in the buffers of Megatron-LM's distributed optimizer.

A `torch_dist` checkpoint stores its states as such buffers by default (`dp_reshardable`; before
core 0.14 `fully_sharded_bucket_space`):

    optimizer.distributed.dp_group_idx_{n}.gbuf_idx_{b}.dtype_(P, G).bucket_idx_{k}.KIND

n: a rank of the model; tensor ranks vary fastest, then pipeline ranks. b: number of a virtual stage
that has parameters. KIND: param, exp_avg, exp_avg_sq, each a vector of all data-parallel ranks that
ends with the last parameter of the bucket.

States have no names, only positions. A buffer contains the parameters of a stage in the reverse
order of its modules, bucket after bucket; each parameter begins at a multiple of 64. The size of a
bucket's vectors says where it ends. If a bucket does not end exactly with a parameter, `Unknown`
says why."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainyard.artifacts.urls import join
from trainyard.conversion.megatron.folder import ALLOWED
from trainyard.conversion.megatron.layout import Cut, boxes_of_rank, cut_of, join_parts
from trainyard.conversion.megatron.names import layer_of, registration_order
from trainyard.conversion.megatron.optimizer import (
    MAIN,
    MOMENTS,
    UNIT,
    Unknown,
    num_updates,
)
from trainyard.conversion.megatron.progress import Scaler, scaler_in
from trainyard.conversion.megatron.stages import (
    degrees_in,
    names_on,
    partition_in,
    style_in,
)
from trainyard.conversion.torch_dist.index import Place, Shape, StoredTensor
from trainyard.conversion.torch_dist.tensors import StoredTensors
from trainyard.conversion.torch_save.file import TorchFile
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.checkpoint_names import EMBEDDING, OUTPUT

KINDS = (MAIN, *MOMENTS)

KEY = re.compile(
    r"((?:chained_0\.)?optimizer\.distributed\.dp_group_idx_(\d{1,9})\.)gbuf_idx_(\d{1,9})\."
    r"dtype_\([a-z0-9_., ]+\)\.bucket_idx_(\d{1,9})\.([a-z_]+)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of one rank's part of a parameter."""

    bucket: str
    """The bucket's key without the kind at its end."""
    begin: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class Joined:
    """A parameter of the whole model."""

    slots: tuple[Slot, ...]
    """One for each tensor rank; only the first if all ranks have the same values."""
    cut: Cut

    def read(self, tensors: StoredTensors, kind: str) -> Tensor:
        """Its whole state of a kind, fp32, a copy."""
        parts = [
            tensors.read(s.bucket + kind, (s.begin,), (math.prod(s.shape),)).view(s.shape)
            for s in self.slots
        ]
        return parts[0] if len(parts) == 1 else join_parts(parts, self.cut)


@dataclass(frozen=True, slots=True)
class _Bucket:
    key: str
    size: int


def states_in_buckets(
    stored: Mapping[str, StoredTensor],
    keys: Collection[str],
    model: Mapping[str, Shape],
    config: TransformerConfig,
    args: Mapping[str, Any],
) -> dict[str, Joined]:
    """The positions of the states of every parameter.

    keys: those of buffers. model: shapes by our names. Raises Unknown if the buffers do not fit the
    model."""
    style = style_in(args)
    tp, pp = degrees_in(args)
    buffers = _buffers(stored, keys)
    ranks = {rank for rank, _ in buffers}
    if len(ranks) != tp * pp or max(ranks) != tp * pp - 1:
        raise Unknown(f"it has buffers of {len(ranks)} ranks, but its args say tp {tp}, pp {pp}")
    split = partition_in(args, config.num_layers)
    slots: dict[str, list[Slot]] = defaultdict(list)
    num_buffers = 0
    for rank in range(tp * pp):
        stages = [names_on(stage, model, config, pp) for stage in split[rank // tp]]
        for number, names in enumerate(filter(None, stages)):
            num_buffers += 1
            order = registration_order(names, style)[::-1]
            shapes = [_shape(name, model, config, rank % tp, tp) for name in order]
            buckets = buffers.get((rank, number), [])
            for name, slot in zip(order, _filled(order, shapes, buckets), strict=True):
                if name in model:  # skips the copy of a tied embedding
                    slots[name].append(slot)
    if num_buffers != len(buffers):
        raise Unknown(f"it has {len(buffers)} buffers, but its stages need {num_buffers}")
    cuts = {name: cut_of(name, config) for name in model}
    return {
        name: Joined(tuple(found[:1] if cuts[name] == "whole" else found), cuts[name])
        for name, found in slots.items()
    }


def check_places(
    found: Mapping[str, Joined], tensors: StoredTensors, weight: Callable[[str], Tensor]
) -> None:
    """Raise Unknown if fp32 parameters do not round to the weights, since the modules were then
    registered in another order.

    Checks all vectors, which lie between the matrices, and layer 0. weight: reads one by name."""
    for name, joined in found.items():
        is_vector = len(joined.slots[0].shape) == 1
        if not is_vector and layer_of(name) != 0:
            continue
        rounded, exact = weight(name), joined.read(tensors, MAIN)
        numbers = torch.finfo(rounded.dtype)
        wanted = rounded.float()
        # Allows a difference of one last digit: some kernels round halves the other way.
        allowed = wanted.abs() * numbers.eps + numbers.tiny * numbers.eps
        if not bool(((exact - wanted).abs() <= allowed).all()):
            raise Unknown(
                f"its fp32 copy of {name} does not round to the weight, so the modules were "
                "registered in another order"
            )


def updates_and_scaler(
    url: str, objects: Mapping[str, Place | None], keys: Iterable[str], step: int
) -> tuple[int, Scaler]:
    """The number of updates of the optimizer, and the loss scale.

    Every rank of the model stores the same values next to its buffers; those of rank 0 are read.
    step: the number of updates if the files have none."""
    matches = (KEY.fullmatch(key) for key in keys)
    begin = next(match[1] for match in matches if match and int(match[2]) == 0)
    updates, scaler = step, Scaler()
    for name in ("optimizer", "grad_scaler"):
        place = objects.get(f"{begin}{name}/shard_0_1")
        if place is None:
            continue
        where = join(url, place[0])
        with TorchFile(where, ALLOWED, place[1:]) as file:
            tree = file.tree
            document = {name: tree[0] if isinstance(tree, list) and len(tree) == 1 else tree}
            if name == "optimizer":
                updates = num_updates(document, file.read, step)
            else:
                scaler = scaler_in(document, file.read, where)
    return updates, scaler


# --- buckets --------------------------------------------------------------------------------------


def _buffers(
    stored: Mapping[str, StoredTensor], keys: Collection[str]
) -> dict[tuple[int, int], list[_Bucket]]:
    """The buckets of each (rank, virtual stage), in order."""
    kinds: dict[tuple[int, int], dict[tuple[int, str], set[str]]] = {}
    for key in keys:
        match = KEY.fullmatch(key)
        if match is None or match[5] not in KINDS:
            raise Unknown(f"{key} is not the key of a known buffer")
        found = stored[key]
        if found.dtype != "float32" or len(found.shape) != 1 or found.unflattened is not None:
            raise Unknown(f"{key} is {found.dtype} {list(found.shape)}, wanted a vector of fp32")
        buckets = kinds.setdefault((int(match[2]), int(match[3])), {})
        buckets.setdefault((int(match[4]), key.removesuffix(match[5])), set()).add(match[5])
    buffers = {}
    for place, buckets in kinds.items():
        if [number for number, _ in sorted(buckets)] != list(range(len(buckets))):
            raise Unknown(f"buckets of {min(buckets)[1]} are missing or occur twice")
        buffers[place] = [_bucket(stored, key, buckets[n, key]) for n, key in sorted(buckets)]
    return buffers


def _bucket(stored: Mapping[str, StoredTensor], key: str, kinds: Collection[str]) -> _Bucket:
    missing = [kind for kind in KINDS if kind not in kinds]
    if missing:
        raise Unknown(f"{key}{missing[0]} is missing")
    sizes = {stored[key + kind].shape[0] for kind in KINDS}
    if len(sizes) > 1:
        raise Unknown(
            f"vectors of {key} have different sizes: {' and '.join(map(str, sorted(sizes)))}"
        )
    return _Bucket(key, sizes.pop())


# --- parameters of a stage --------------------------------------------------------------------


def _shape(
    name: str, model: Mapping[str, Shape], config: TransformerConfig, rank: int, tp: int
) -> Shape:
    whole = model[name if name in model else EMBEDDING]
    try:
        return boxes_of_rank(whole, cut_of(name, config), rank, tp).shape
    except ValueError as error:
        raise Unknown(f"{name} of its model {error}") from error


def _filled(names: list[str], shapes: list[Shape], buckets: list[_Bucket]) -> Iterator[Slot]:
    """Lay parameters into buckets one after the other; each bucket must end with one of them."""
    left = iter(buckets)
    bucket: _Bucket | None = None
    end = 0
    for name, shape in zip(names, shapes, strict=True):
        begin = -(-end // UNIT) * UNIT
        # A tied embedding has a separate bucket; the one before it includes the padding.
        closes_early = name in (EMBEDDING, OUTPUT) and bucket and begin == bucket.size
        if bucket is None or end == bucket.size or closes_early:
            bucket, begin = next(left, None), 0
        end = begin + math.prod(shape)
        if bucket is None or end > bucket.size:
            where = f"{bucket.key} ends at {bucket.size}" if bucket else "no bucket is left"
            raise Unknown(f"{name} would end at {end}, but {where}")
        yield Slot(bucket.key, begin, shape)
    last = next(left, None) or bucket
    if last and (last != bucket or end != last.size):
        raise Unknown(f"its parameters end at {end}, before the end of {last.key}")
