"""The optimizer that the options ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from trainyard.optim.config import OptimizerConfig
from trainyard.optim.groups import Condition, is_vector, multipliers_of
from trainyard.optim.muon import Muon
from trainyard.optim.narrow_moments import NarrowMoments
from trainyard.optim.optimizer import ModelOptimizer, OptimizerGroups
from trainyard.optim.owned_params import Traits
from trainyard.optim.precision import NumberFormat, PrecisionConfig
from trainyard.optim.rules import build_rule
from trainyard.optim.scaler import build_scaler
from trainyard.optim.update import Moment, UpdateRule
from trainyard.parallel.data.buffers import Member
from trainyard.parallel.data.chunk import Chunk
from trainyard.parallel.model import group_rank
from trainyard.parallel.sharding import is_expert, shard_of

DTYPES: dict[NumberFormat, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def params_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Type of the model's parameters."""
    return DTYPES[precision.params_format]


def grads_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Type in which gradients are added up: `grad_dtype` of DataParallel."""
    return DTYPES[precision.grads_format]


def build_optimizer(
    chunks: Sequence[Chunk],
    config: OptimizerConfig,
    precision: PrecisionConfig,
    groups: OptimizerGroups,
    *,
    device: torch.device,
    tied: nn.Parameter | None = None,
    copies: Mapping[str, str] | None = None,
    no_weight_decay: Condition = is_vector,
    scale_lr: Condition | None = None,
    lr_mult: float = 1.0,
) -> ModelOptimizer:
    """The optimizer of the chunks of a model that this rank holds.

    device: where the chunks are. tied: this stage's end of an embedding that is tied over stages.
    copies: names of parameters that only repeat another's, each with the name of that one: saved
    under it, counted there. no_weight_decay, scale_lr: of which parameters, by global name; scaled
    ones take `lr_mult` times the learning rate."""
    repeated = copies or {}
    is_first = group_rank(groups.tp) == 0
    is_first_of_expert = group_rank(groups.expert_tp) == 0

    def is_counted(name: str, parameter: nn.Parameter) -> bool:
        shard = shard_of(parameter)
        if is_expert(parameter):  # cut by expert parallelism along dim 0, by tensor along others
            is_cut = shard is not None and any(cut.dim > 0 for cut in shard.cuts)
            return is_first_of_expert or is_cut
        return name not in repeated and (is_first or shard is not None)

    def traits_of(member: Member) -> Traits:
        name, parameter = member
        multipliers = multipliers_of(
            name,
            parameter,
            config,
            no_weight_decay=no_weight_decay,
            scale_lr=scale_lr,
            lr_mult=lr_mult,
        )
        return Traits(
            repeated.get(name, name),
            multipliers,
            is_counted=is_counted(name, parameter),
            moments=(Moment(Muon.moment),) if multipliers.is_orthogonalized else moments,
        )

    scaler = build_scaler(precision)
    rule: UpdateRule = build_rule(config, device.type)
    host_rule: UpdateRule = build_rule(replace(config, optimizer_backend="torch"), "cpu")
    formats = precision.moment_formats
    if formats:
        rule, host_rule = NarrowMoments(rule), NarrowMoments(host_rule)
    moments = tuple(
        Moment(name, DTYPES[formats[name]] if name in formats else None) for name in rule.moments
    )
    return ModelOptimizer(
        *(chunks, config, rule, host_rule, scaler, groups, traits_of),
        device=device,
        tied=tied,
    )
