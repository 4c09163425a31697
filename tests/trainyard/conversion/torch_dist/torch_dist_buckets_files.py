"""States of Megatron's distributed optimizer in its default kind, for tests: buffers of the ranks
of a model, cut into buckets and these over data-parallel ranks.

Written from what `param_and_grad_buffer.py` and `distrib_optimizer.py` of megatron-core 0.16.1 do,
and without any module of ours that reads them. What no parameter lies in is NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.trainyard.conversion.megatron.megatron_files import Layout as RankLayout
from tests.trainyard.conversion.megatron.megatron_files import chunk_items, part_of_rank
from tests.trainyard.conversion.megatron.megatron_states import Whole
from tests.trainyard.conversion.torch_dist.torch_dist_files import (
    Layout,
    Planner,
    Stored,
    megatron_metadata,
    quietly_save,
    stored_of,
    write_around,
)
from trainyard.models.gpt.config import GPTConfig

EMBEDDING = "embedding.word_embeddings.weight"
IMPLS = {"core": "local", "engine": "transformer_engine"}


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """How a run laid out its buffers."""

    spelling: str = "engine"
    """Layers of Transformer Engine, or core: the local ones."""
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    size: int | None = None
    """Numbers after which a bucket is closed, on the first pipeline rank."""
    dtype: str = "torch.bfloat16"

    @property
    def name(self) -> str:
        """For the names of tests."""
        ranks = f"{self.spelling} tp{self.tp} pp{self.pp} vpp{self.vpp} dp{self.dp}"
        return f"{ranks} buckets of {self.size}"

    @property
    def args(self) -> dict[str, Any]:
        """What the arguments say of it."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "transformer_impl": IMPLS[self.spelling],
        }


def up(number: int, divisor: int) -> int:
    return math.ceil(number / divisor) * divisor


def laid_out(
    sizes: list[tuple[int, bool]], bucket_size: int | None, dp: int
) -> list[tuple[int, int, int, list[tuple[int, int, int]]]]:
    """(begin, end without padding, end, [(number of the parameter, begin, end)]) of each bucket,
    all counted in the buffer. sizes: with whether it is a shared embedding, last module first."""
    found = []
    begin, at, members = 0, 0, []
    for number, (size, is_shared) in enumerate(sizes):
        at = up(at, 64)
        if is_shared and members:
            end = up(at, math.lcm(dp, 128))
            found.append((begin, at, end, members))
            begin, at, members = end, end, []
        members.append((number, at, at + size))
        at += size
        if is_shared or (bucket_size is not None and at - begin >= bucket_size):
            end = up(at, math.lcm(dp, 128))
            found.append((begin, at, end, members))
            begin, at, members = end, end, []
    if members:
        found.append((begin, at, up(at, math.lcm(dp, 128)), members))
    return found


def states_of_ranks(
    states: Mapping[str, Whole], config: GPTConfig, how: Buckets
) -> dict[str, Stored]:
    """Every vector of every rank of the model, by its key."""
    found: dict[str, Stored] = {}
    ranks = RankLayout(spelling=how.spelling, tp=how.tp, pp=how.pp, vpp=how.vpp)
    tied = not config.untie_embeddings_and_output_weights
    for pp_rank in range(how.pp):
        for tp_rank in range(how.tp):
            for chunk in range(how.vpp):
                modules = list(chunk_items(states["param"], config, ranks, pp_rank, chunk))
                names = [ours for _, ours in reversed(modules)]
                parts = {
                    kind: [part_of_rank(n, whole[n], config, 3.0, tp_rank, how.tp) for n in names]
                    for kind, whole in states.items()
                }
                if tied and pp_rank == how.pp - 1 > 0 and names[0] == EMBEDDING:
                    for tensors in parts.values():  # the copy, which is not to be read
                        tensors[0] = torch.full_like(tensors[0], torch.nan)
                shared = [tied and how.pp > 1 and name == EMBEDDING for name in names]
                sizes = [(p.numel(), s) for p, s in zip(parts["param"], shared, strict=True)]
                size = None if pp_rank or chunk else how.size
                key = f"optimizer.distributed.dp_group_idx_{tp_rank + how.tp * pp_rank}."
                key += f"gbuf_idx_{chunk}.dtype_({how.dtype}, torch.float32)."
                for number, bucket in enumerate(laid_out(sizes, size, how.dp)):
                    for kind, tensors in parts.items():
                        name = f"{key}bucket_idx_{number}.{kind}"
                        found[name] = vector(bucket, tensors, how.dp)
    return found


def vector(
    bucket: tuple[int, int, int, list[tuple[int, int, int]]], tensors: list[Tensor], dp: int
) -> Stored:
    """One bucket, as its data-parallel ranks write it: each parameter and each gap a piece."""
    begin, unpadded, end, members = bucket
    values = torch.full((end - begin,), torch.nan)
    edges = {0, unpadded - begin}
    for number, first, last in members:
        values[first - begin : last - begin] = tensors[number].flatten().float()
        edges |= {first - begin, last - begin}
    edges |= set(range(0, unpadded - begin, (end - begin) // dp))
    cuts = sorted(edges)
    pieces = [((a,), values[a:b].clone()) for a, b in pairwise(cuts)]
    return Stored((unpadded - begin,), pieces)


def write_buckets(
    root: Path,
    whole: Whole,
    config: GPTConfig,
    how: Buckets,
    stored: Mapping[str, Stored],
    objects: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint with these vectors. objects: what every rank of the model keeps beside them."""
    content = {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    layout = Layout(tp=how.tp, args=how.args, common=content)
    folder = write_around(root, config, layout, whole[EMBEDDING].shape[0])
    kept = {
        f"optimizer.distributed.dp_group_idx_{rank}.{name}/shard_0_1": value
        for rank in range(how.tp * how.pp)
        for name, value in (objects or {}).items()
    }
    planner = Planner({**stored_of(whole, config, layout), **stored}, kept, layout.own_class)
    with megatron_metadata():
        quietly_save(folder, planner)
    return root
