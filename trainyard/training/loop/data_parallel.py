"""The parameters of a model chunk over its data-parallel ranks: whole, or fully sharded."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.distributed import ProcessGroup

from trainyard.models.fp8 import fp8_weights
from trainyard.models.tied import EMBEDDING
from trainyard.optim.build import grads_dtype, params_dtype
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.data.chunk import Chunk
from trainyard.parallel.data.data_parallel import DataParallel
from trainyard.parallel.data.fp8_codec import Fp8Weights
from trainyard.parallel.data.fully_sharded import FullSharding, FullyShardedModel, FullyShardedPart
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.parallel.groups import ProcessGroups
from trainyard.parallel.shard_groups import ShardGroups
from trainyard.parallel.sharding import is_expert


def is_fully_sharded(config: DataParallelConfig, groups: ProcessGroups) -> bool:
    """Whether gradients or weights are sharded: not if each instance is one rank alone."""
    return config.fully_shards and groups.dp_cp_shards.shard is not None


def data_parallel_parts(
    chunk: nn.Module,
    config: DataParallelConfig,
    precision: PrecisionConfig,
    groups: ProcessGroups,
    copies: Collection[str],
    device: torch.device,
    *,
    always_flat: bool = False,
    keeps_gradients: bool = False,
) -> list[Chunk]:
    """The parameters of a chunk over the ranks that hold the same weights. Those of routed experts
    are apart where other ranks hold them. copies: names of those that repeat
    another's. always_flat: as in DataParallel. keeps_gradients: in the format of their parameters,
    as there is nothing to add up (`PrecisionConfig.keeps_gradients`)."""
    if is_fully_sharded(config, groups):
        return _fully_sharded(chunk, config, precision, groups, device)
    named = list(chunk.named_parameters())
    apart = groups.has_expert_grid
    fp8 = _sent_in_8_bits(chunk, config, precision)

    def part(group: ProcessGroup | None, shards: ShardGroups, *, of_experts: bool) -> DataParallel:
        return DataParallel(
            [pair for pair in named if (apart and is_expert(pair[1])) is of_experts],
            group,
            config,
            shards=shards,
            grad_dtype=None if keeps_gradients else grads_dtype(precision),
            alone={EMBEDDING, *copies},
            fp8=fp8,
            of_experts=of_experts,
            always_flat=always_flat,
        )

    dense = part(groups.dp_cp, groups.dp_cp_shards, of_experts=False)
    if not apart:
        return [dense]
    return [dense, part(groups.expert_dp, groups.expert_dp_shards, of_experts=True)]


def _sent_in_8_bits(
    chunk: nn.Module, config: DataParallelConfig, precision: PrecisionConfig
) -> Fp8Weights | None:
    """The weights that can be, if they are to be."""
    recipe = precision.fp8
    if not config.fp8_param_gather or recipe is None or not recipe.survives_decoding:
        return None
    return Fp8Weights(fp8_weights(chunk), recipe.scaling)


def _fully_sharded(
    chunk: nn.Module,
    config: DataParallelConfig,
    precision: PrecisionConfig,
    groups: ProcessGroups,
    device: torch.device,
) -> list[Chunk]:
    """Layers and the rest are units. With an expert grid, so are the experts of each layer, over
    ranks of their own; alone there, they are whole."""
    model = FullyShardedModel(
        chunk,
        FullSharding(
            params_dtype=params_dtype(precision),
            grads_dtype=grads_dtype(precision),
            reshard_after_forward=config.sharding == "optim_grads_params",
            device=device,
        ),
    )
    experts: list[Chunk] = []
    whole: list[nn.Parameter] = []
    if groups.has_expert_grid:
        shards = groups.expert_dp_shards
        if shards.shard is not None:
            members = model.shard(list(_expert_modules(chunk)), shards)
            experts.append(FullyShardedPart(model, members, shards, of_experts=True))
        else:
            named = [pair for pair in chunk.named_parameters() if is_expert(pair[1])]
            for _, parameter in named:
                parameter.data = parameter.data.to(device)
            whole = [parameter for _, parameter in named]
            dtype = grads_dtype(precision)
            data = DataParallel(named, shards.everyone, grad_dtype=dtype, of_experts=True)
            experts.append(data)
    shards = groups.dp_cp_shards
    members = model.shard([*_layers(chunk), chunk], shards, whole)
    model.finish_building()
    return [FullyShardedPart(model, members, shards), *experts]


def _layers(chunk: nn.Module) -> Iterator[nn.Module]:
    """What modules list as their `layers`, those inside of others first."""
    lists = [getattr(module, "layers", None) for module in chunk.modules()]
    for layers in reversed(lists):
        if isinstance(layers, nn.ModuleDict | nn.ModuleList):
            yield from layers.children()


def _expert_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The largest modules inside that have parameters of experts only."""
    for child in module.children():
        parameters = list(child.parameters())
        if parameters and all(is_expert(parameter) for parameter in parameters):
            yield child
        else:
            yield from _expert_modules(child)
