"""Experts in Megatron-LM's files: one matrix each, numbered on their rank, where ours are stacked.

    mlp.experts.local_experts.3.linear_fc1.weight   an MLP for each expert
    mlp.experts.linear_fc1.weight3                  Transformer Engine's grouped product
    mlp.experts.experts.linear_fc1.weight           torch_dist, stacked as ours

The second is read as the first. Pure functions of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.megatron.model import WholeModel
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.config import TransformerConfig

SINGLE = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d{1,9})\.(linear_fc[12]\.(?:weight|bias))")
GROUPED = re.compile(r"(.*mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d{1,9})")
STACKED = re.compile(r"(.*mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))")
SHARDED = "mlp.experts.experts."


def is_of_experts(name: str) -> bool:
    """Whether a parameter of ours is of the routed experts."""
    return STACKED.fullmatch(name) is not None


def single_name(path: str) -> str:
    """A path of Megatron-LM with every expert's matrix under its own number."""
    if SHARDED in path:
        return path.replace(SHARDED, "mlp.experts.")
    match = GROUPED.fullmatch(path)
    return path if match is None else name_of_expert(match[1], int(match[2]))


def sharded_name(stacked: str) -> str:
    """The key of `torch_dist` of a tensor of all experts; any other name as it is."""
    match = STACKED.fullmatch(stacked)
    return stacked if match is None else f"{match[1]}experts.{match[2]}"


def name_of_expert(stacked: str, expert: int) -> str:
    """The name of one expert's matrix, of that of all."""
    match = STACKED.fullmatch(stacked)
    assert match is not None, stacked
    return f"{match[1]}local_experts.{expert}.{match[2]}"


def stacked_name(single: str) -> str:
    """The name of the matrices of all experts, of that of one; any other name as it is."""
    match = SINGLE.fullmatch(single)
    return single if match is None else f"{match[1]}{match[3]}"


def grouped_name(single: str) -> str:
    """The path of Transformer Engine's grouped product."""
    match = SINGLE.fullmatch(single)
    return single if match is None else f"{match[1]}{match[3]}{match[2]}"


def with_expert_offset(name: str, offset: int) -> str:
    """The name in the whole model of a matrix whose rank begins at expert `offset`, or back by a
    negative one."""
    match = SINGLE.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}local_experts.{int(match[2]) + offset}.{match[3]}"


def expert_of(name: str) -> int | None:
    """The expert in a name; None for one of no expert."""
    match = SINGLE.fullmatch(name)
    return None if match is None else int(match[2])


# --- reading ----------------------------------------------------------------------------------


def stacks_in(names: Iterable[str], url: str) -> dict[str, list[str]]:
    """The stacked tensors that matrices of experts make up, each with their names in order. Raises
    ArtifactError if one is missing."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        if match := SINGLE.fullmatch(name):
            found.setdefault(f"{match[1]}{match[3]}", {})[int(match[2])] = name
    stacks = {}
    for stacked, members in found.items():
        if sorted(members) != list(range(len(members))):
            raise ArtifactError(
                f"{url}: {stacked} has {len(members)} experts, numbered up to {max(members)}; the "
                "files of some expert-parallel ranks are missing"
            )
        stacks[stacked] = [members[expert] for expert in range(len(members))]
    return stacks


def stacked_specs(
    specs: Mapping[str, TensorSpec], stacks: Mapping[str, Sequence[str]]
) -> dict[str, TensorSpec]:
    """The types and shapes with experts stacked. Raises ValueError where they differ."""
    found = {name: spec for name, spec in specs.items() if SINGLE.fullmatch(name) is None}
    for stacked, names in stacks.items():
        first = specs[names[0]]
        if any(specs[name] != first for name in names):
            raise ValueError(f"{stacked}: experts have different shapes or types")
        found[stacked] = TensorSpec(first.dtype, (len(names), *first.shape))
    return found


# --- writing ----------------------------------------------------------------------------------


def with_single_experts(model: WholeModel) -> WholeModel:
    """The weights of a model with a tensor for each expert."""
    if not model.config.experts.enabled:
        return model
    specs: dict[str, TensorSpec] = {}
    places: dict[str, tuple[str, int]] = {}
    for name, spec in model.specs.items():
        if not name.startswith("model."):
            continue
        if STACKED.fullmatch(name) is None:
            specs[name] = spec
            continue
        for expert in range(spec.shape[0]):
            single = name_of_expert(name, expert)
            specs[single] = TensorSpec(spec.dtype, spec.shape[1:])
            places[single] = (name, expert)

    def read_slice(name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        if name not in places:
            return model.read_slice(name, offset, extent)
        stacked, expert = places[name]
        found = model.read_slice(stacked, (expert, *offset), (1, *extent))
        return torch.squeeze(found, 0)

    return replace(model, specs=specs, read_slice=read_slice)


def check_expert_ranks(config: TransformerConfig, ep: int) -> None:
    """Raise ConfigError if `ep` ranks cannot share the experts evenly."""
    experts = config.experts.num_experts
    if experts is None and ep > 1:
        raise ConfigError(
            f"--target-expert-parallel-size {ep}: the model has no experts; leave the option out"
        )
    if experts is not None and experts % ep:
        raise ConfigError(
            f"--target-expert-parallel-size ({ep}) must divide the {experts} experts of the model"
        )
