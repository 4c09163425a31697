"""Finds parameters in the buffers of Megatron-LM's distributed optimizer.

A `torch_dist` checkpoint stores its states as such buffers by default (`dp_reshardable`; before
core 0.14 `fully_sharded_bucket_space`):

    optimizer.distributed.dp_group_idx_{n}.gbuf_idx_{b}.dtype_(P, G).bucket_idx_{k}.KIND

n: a rank of the model; tensor ranks vary fastest, then pipeline ranks. b: number of a virtual stage
that has parameters. KIND: param, exp_avg, exp_avg_sq, each a vector of all data-parallel ranks that
ends with the last parameter of the bucket.

If expert-parallel ranks share the experts, keys begin with `chained_0.`, and with `chained_1.`
those of an optimizer of the experts alone: there n counts the ranks that share an expert, then
expert-parallel ranks, then pipeline ranks.

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
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from trainyard.artifacts.urls import join
from trainyard.conversion.megatron.experts import (
    is_of_experts,
    name_of_expert,
    stacked_name,
)
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
    expert_degrees_in,
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
    r"(?P<rank_key>(?:chained_(?P<optimizer>\d)\.)?optimizer\.distributed\."
    r"dp_group_idx_(?P<rank>\d{1,9})\.)gbuf_idx_(?P<number>\d{1,9})\."
    r"dtype_\([a-z0-9_., ]+\)\.bucket_idx_(?P<bucket>\d{1,9})\.(?P<kind>[a-z_]+)",
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

    @property
    def is_vector(self) -> bool:
        """Whether it has one dim."""
        return len(self.slots[0].shape) == 1

    def read(self, tensors: StoredTensors, kind: str) -> Tensor:
        """Its whole state of a kind, fp32, a copy."""
        parts = [
            tensors.read(s.bucket + kind, (s.begin,), (math.prod(s.shape),)).view(s.shape)
            for s in self.slots
        ]
        return parts[0] if len(parts) == 1 else join_parts(parts, self.cut)


@dataclass(frozen=True, slots=True)
class Stacked:
    """A parameter of all experts, of which Megatron has one for each."""

    experts: tuple[Joined, ...]

    @property
    def is_vector(self) -> bool:
        """Whether that of an expert has one dim."""
        return self.experts[0].is_vector

    def read(self, tensors: StoredTensors, kind: str) -> Tensor:
        """Its whole state of a kind, fp32, a copy."""
        first = self.experts[0].read(tensors, kind)
        found = first.new_empty(len(self.experts), *first.shape)
        found[0] = first
        for number, expert in enumerate(self.experts[1:], 1):
            found[number] = expert.read(tensors, kind)
        return found


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """One of those that share the parameters."""

    number: int
    experts: bool | None
    """Whether it has those of experts; None: all parameters."""
    tp: int
    """Ranks that share a matrix."""
    ep: int = 1

    def __str__(self) -> str:
        """What args say of its ranks, for a message."""
        if self.experts:
            return f" for experts, but its args say etp {self.tp}, ep {self.ep}"
        return f", but its args say tp {self.tp}"

    def has(self, name: str) -> bool:
        """Whether a parameter is its."""
        return self.experts is None or is_of_experts(name) == self.experts

    def rank(self, tp_rank: int, ep_rank: int, stage: int) -> int:
        """The number of a rank in its keys."""
        return tp_rank + self.tp * (ep_rank + self.ep * stage)


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
) -> dict[str, Joined | Stacked]:
    """The positions of the states of every parameter.

    keys: those of buffers. model: shapes by our names, of parameters alone. Raises Unknown if the
    buffers do not fit the model."""
    if config.mtp.mtp_num_layers is not None:
        raise Unknown("the order of parameters of multi-token prediction is not known")
    style = style_in(args)
    if config.latent.enabled:  # there Transformer Engine's layer too has a norm before attention
        style = "local"
    grouped = bool(args.get("moe_grouped_gemm"))
    _, pp = degrees_in(args)
    buffers = _buffers(stored, keys)
    stages = [
        [names_on(stage, model, config, pp) for stage in of_rank]
        for of_rank in partition_in(args, config.num_layers)
    ]
    slots: dict[str, list[Slot]] = defaultdict(list)
    found: set[tuple[int, int, int]] = set()
    for optimizer in _optimizers(config, args):
        holders = [of_rank for of_rank in stages if any(map(optimizer.has, chain(*of_rank)))]
        ranks = {rank for number, rank, _ in buffers if number == optimizer.number}
        if len(ranks) != len(holders) * optimizer.ep * optimizer.tp:
            raise Unknown(f"it has buffers of {len(ranks)} ranks{optimizer}, pp {pp}")
        for stage, ep_rank, tp_rank in product(range(pp), range(optimizer.ep), range(optimizer.tp)):
            rank = optimizer.rank(tp_rank, ep_rank, stage)
            of_stage = [[n for n in names if optimizer.has(n)] for names in stages[stage]]
            for number, names in enumerate(filter(None, of_stage)):
                singles = _singles(names, model, ep_rank, optimizer.ep)
                order = registration_order(singles, style, grouped=grouped)[::-1]
                shapes = [_shape(name, model, config, tp_rank, optimizer.tp) for name in order]
                buckets = buffers.get((optimizer.number, rank, number), [])
                found.add((optimizer.number, rank, number))
                for name, slot in zip(order, _filled(order, shapes, buckets), strict=True):
                    slots[name].append(slot)
    if len(found) != len(buffers):
        raise Unknown(f"it has {len(buffers)} buffers, but its stages need {len(found)}")
    return {name: _whole(name, model[name], slots, config) for name in model}


def _optimizers(config: TransformerConfig, args: Mapping[str, Any]) -> list[_Optimizer]:
    """Those of a run: with several expert-parallel ranks one more, for the experts."""
    tp, _ = degrees_in(args)
    if not config.experts.enabled:
        return [_Optimizer(0, None, tp)]
    etp, ep = expert_degrees_in(args, tp)
    if (config.experts.num_experts or ep) % ep:
        raise Unknown(
            f"its args give {ep} expert-parallel ranks to {config.experts.num_experts} experts"
        )
    if ep > 1:
        return [_Optimizer(0, False, tp), _Optimizer(1, True, etp, ep)]
    if etp != tp:
        raise Unknown(f"{etp} ranks share an expert and {tp} the other matrices of one optimizer")
    return [_Optimizer(0, None, tp)]


def _singles(names: Iterable[str], model: Mapping[str, Shape], rank: int, ep: int) -> list[str]:
    """The names with each expert of an expert-parallel rank under its own."""
    found = []
    for name in names:
        if is_of_experts(name):
            count = model[name][0] // ep
            found += [name_of_expert(name, rank * count + i) for i in range(count)]
        else:
            found.append(name)
    return found


def _whole(
    name: str, shape: Shape, slots: Mapping[str, list[Slot]], config: TransformerConfig
) -> Joined | Stacked:
    if is_of_experts(name):
        singles = (name_of_expert(name, expert) for expert in range(shape[0]))
        return Stacked(tuple(_joined(single, slots, config) for single in singles))
    return _joined(name, slots, config)


def _joined(name: str, slots: Mapping[str, list[Slot]], config: TransformerConfig) -> Joined:
    cut, found = cut_of(name, config), slots[name]
    return Joined(tuple(found[:1] if cut == "whole" else found), cut)


def check_places(
    found: Mapping[str, Joined | Stacked],
    tensors: StoredTensors,
    weight: Callable[[str], Tensor],
) -> None:
    """Raise Unknown if fp32 parameters do not round to the weights, since the modules were then
    registered in another order.

    Checks all vectors, which lie between the matrices, layer 0, and the first layer with experts.
    weight: reads one by name."""
    mixtures = (layer_of(name) for name in found if is_of_experts(name))
    checked = {0, min((layer for layer in mixtures if layer is not None), default=0)}
    for name, joined in found.items():
        if not joined.is_vector and layer_of(name) not in checked:
            continue
        rounded = weight(name)
        # One expert after the other: those of a layer together may take half of the memory.
        pairs = (
            zip(rounded, joined.experts, strict=True)
            if isinstance(joined, Stacked)
            else [(rounded, joined)]
        )
        if not all(_rounds_to(one, part.read(tensors, MAIN)) for one, part in pairs):
            raise Unknown(
                f"its fp32 copy of {name} does not round to the weight, so the modules were "
                "registered in another order"
            )


def _rounds_to(rounded: Tensor, exact: Tensor) -> bool:
    """Whether fp32 numbers are those that were rounded, but for one last digit: some kernels round
    halves the other way."""
    numbers = torch.finfo(rounded.dtype)
    wanted = rounded.float()
    allowed = wanted.abs() * numbers.eps + numbers.tiny * numbers.eps
    return bool(((exact - wanted).abs() <= allowed).all())


def updates_and_scaler(
    url: str, objects: Mapping[str, Place | None], keys: Iterable[str], step: int
) -> tuple[int, Scaler]:
    """The number of updates of the optimizer, and the loss scale.

    Every rank of the model stores the same values next to its buffers; those of rank 0 are read.
    step: the number of updates if the files have none."""
    matches = (KEY.fullmatch(key) for key in keys)
    begin = next(
        match["rank_key"]
        for match in matches
        if match and int(match["rank"]) == int(match["optimizer"] or 0) == 0
    )
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
) -> dict[tuple[int, int, int], list[_Bucket]]:
    """The buckets of each (optimizer, rank, virtual stage), in order."""
    kinds: dict[tuple[int, int, int], dict[tuple[int, str], set[str]]] = {}
    for key in keys:
        match = KEY.fullmatch(key)
        if match is None or match["kind"] not in KINDS:
            raise Unknown(f"{key} is not the key of a known buffer")
        found = stored[key]
        if found.dtype != "float32" or len(found.shape) != 1 or found.unflattened is not None:
            raise Unknown(f"{key} is {found.dtype} {list(found.shape)}, wanted a vector of fp32")
        place = int(match["optimizer"] or 0), int(match["rank"]), int(match["number"])
        bucket = int(match["bucket"]), key.removesuffix(match["kind"])
        kinds.setdefault(place, {}).setdefault(bucket, set()).add(match["kind"])
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
    stacked = stacked_name(name)
    whole = model[stacked][1:] if stacked != name else model.get(name, model[EMBEDDING])
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
