"""Translates keys of a `torch_dist` checkpoint of Megatron core to our names, and back.

    decoder.layers.X                     [L, ...], all L layers; Transformer Engine's names
    decoder.layers.{i}.X                 one layer, numbered in the whole model (not homogeneous)
    embedding... decoder.final... output_layer.weight (untied)        same names as ours
    optimizer.state.KIND.KEY             state of the parameter KEY, of its shape
    chained_{n}.optimizer...             the same, of releases before 0.14

Everything else below `optimizer.` is stored as buffers of ranks (`buckets`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainyard.conversion.megatron.names import (
    OURS_LAYER,
    STACKS,
    is_state_of_engine,
    our_name,
    their_name,
)
from trainyard.models.config import ModelType
from trainyard.models.config_checks import MAX_LAYERS
from trainyard.models.gpt.checkpoint_names import LAYER, WITH_EXTRA_STATE

STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")
OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")

KINDS = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "param": "param",
    "fp32_param": "param",
}
"""Our kind by theirs: `fp32_param` of the plain optimizer, `param` of the distributed one."""


@dataclass(frozen=True, slots=True)
class Source:
    """The stored tensor that contains one of ours."""

    key: str
    layer: int | None
    """Our layer in a tensor of all layers; None: the whole tensor."""


@dataclass(frozen=True, slots=True)
class Named:
    """The tensors of a folder by our names: "model.NAME", "optimizer.KIND.NAME"."""

    sources: Mapping[str, Source]
    unknown: tuple[str, ...]
    """Keys without a tensor of our model."""
    in_buffers: tuple[str, ...]
    """Keys of states stored as buffers of ranks."""


def name_tensors(
    shapes: Mapping[str, tuple[int, ...]], *, tied: bool, family: ModelType = "gpt"
) -> Named:
    """Our names for the tensors of a folder. shapes: by key. Raises ValueError if two keys have
    one name."""
    sources: dict[str, Source] = {}
    unknown: list[str] = []
    in_buffers: list[str] = []
    for key, shape in shapes.items():
        prefix, rest = "model", key
        if match := STATE.fullmatch(key):
            prefix, rest = f"optimizer.{KINDS.get(match[1], '')}", match[2]
            if match[1] not in KINDS:
                in_buffers.append(key)
                continue
        elif OPTIMIZER.match(key):
            in_buffers.append(key)
            continue
        if is_state_of_engine(rest):
            continue
        found = _names(rest, shape, tied, family)
        if found is None:
            unknown.append(key)
            continue
        for name, layer in found:
            full = f"{prefix}.{name}"
            if full in sources:
                raise ValueError(f"{sources[full].key} and {key} are both {full}")
            sources[full] = Source(key, layer)
    return Named(sources, tuple(unknown), tuple(in_buffers))


def _names(
    key: str, shape: tuple[int, ...], tied: bool, family: ModelType
) -> Iterable[tuple[str, int | None]] | None:
    """Our names of the tensors that one key contains, with their layers; None if unknown."""
    stack = f"{STACKS[family][0]}layers."
    if not key.startswith(stack) or OURS_LAYER.fullmatch(key):
        name = our_name(key, tied=tied, family=family)
        return None if name != key and not key.startswith(stack) else [(name or key, None)]
    rest = key.removeprefix(stack)
    if not shape or shape[0] > MAX_LAYERS:
        return None
    keys = [f"{stack}{layer}.{rest}" for layer in range(shape[0])]
    names = [our_name(key, tied=tied, family=family) for key in keys]
    return [(name, layer) for layer, name in enumerate(names) if name is not None]


# --- ours to theirs -------------------------------------------------------------------------------


def stacked_key(name: str) -> tuple[str, int | None]:
    """The key of one of our parameters, and its layer if the key is for all layers."""
    match = OURS_LAYER.fullmatch(name)
    if match is None:
        return name, None
    theirs = their_name(name, "transformer_engine")
    return LAYER + theirs.removeprefix(f"{LAYER}{match[1]}."), int(match[1])


def extra_states(keys: Iterable[str], num_layers: int) -> list[str]:
    """Names of the pickled objects that Megatron core requires besides tensors: FP8 scales, which
    are written empty."""
    modules = {key.rpartition(".")[0] for key in keys}
    found = []
    for module in WITH_EXTRA_STATE:
        if f"{LAYER}{module}" in modules:
            state = f"{LAYER}{module}._extra_state"
            found += [f"{state}/shard_{layer}_{num_layers}" for layer in range(num_layers)]
    return [*found, "decoder.final_layernorm._extra_state/shard_0_1"]
