"""Translates keys of a `torch_dist` checkpoint of Megatron core to our names, and back.

    decoder.layers.X                     [L, ...], all L layers; Transformer Engine's names
    decoder.layers.{i}.X                 one layer, numbered in the whole model (not homogeneous)
    ....cross_attention.encoder.layers.{j}.X     a layer of a Retro's encoder
    ....mlp.experts.experts.X            [L, E, ...] or [E, ...], all experts, as ours
    ....mixer.in_proj.weight.z ...       parts of a tensor of ours (Mamba)
    mtp.layers.{i}.X                     a depth of multi-token prediction
    embedding... decoder.final... output_layer.weight (untied)        same names as ours
    optimizer.state.KIND.KEY             state of the parameter KEY, of its shape
    chained_{n}.optimizer...             the same, of releases before 0.14

Everything else below `optimizer.` is stored as buffers of ranks (`buckets`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from trainyard.conversion.megatron.experts import sharded_name
from trainyard.conversion.megatron.layout import cut_of
from trainyard.conversion.megatron.names import (
    OURS_LAYER,
    REPEATED,
    STACKS,
    TIED_COPY,
    TransformerImpl,
    is_in_mixture,
    is_state_of_engine,
    layer_of,
    our_name,
    repeated_names,
    stack_of,
    their_name,
)
from trainyard.models.config import ModelType, TransformerConfig
from trainyard.models.config_checks import MAX_LAYERS
from trainyard.models.mamba import checkpoint_names as mamba_names

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
    """The stored tensors that contain one of ours."""

    keys: tuple[str, ...]
    """One, or parts that follow each other along the first dim of ours."""
    layer: int | None
    """Our layer in tensors of all layers; None: the whole tensors."""


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
    parts: dict[str, dict[int, tuple[str, int | None]]] = {}
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
        whole, part = mamba_names.part_of(rest) if family == "mamba" else (rest, 0)
        found = _names(whole, shape, tied, family)
        if found is None:
            unknown.append(key)
            continue
        for name, layer in found:
            full = f"{prefix}.{name}"
            places = parts.setdefault(full, {})
            if part in places:
                raise ValueError(f"{places[part][0]} and {key} are both {full}")
            places[part] = key, layer
    sources = {full: _source(places) for full, places in parts.items()}
    return Named(sources, tuple(unknown), tuple(in_buffers))


def _source(places: Mapping[int, tuple[str, int | None]]) -> Source:
    in_order = [places[part] for part in sorted(places)]
    return Source(tuple(key for key, _ in in_order), in_order[0][1])


def _names(
    key: str, shape: tuple[int, ...], tied: bool, family: ModelType
) -> Iterable[tuple[str, int | None]] | None:
    """Our names of the tensors that one key contains, with their layers; None if unknown. A tensor
    that files have twice is named once."""
    layers = stack_of(key)
    of_stack = layers.removesuffix("layers.") in STACKS[family] and key.startswith(layers)
    if not of_stack or OURS_LAYER.fullmatch(key):
        name = our_name(key, tied=tied, family=family)
        if name == REPEATED:
            return []
        return None if name in (None, TIED_COPY) else [(name, None)]
    rest = key.removeprefix(layers)
    if not shape or shape[0] > MAX_LAYERS:
        return None
    keys = [f"{layers}{layer}.{rest}" for layer in range(shape[0])]
    names = [our_name(key, tied=tied, family=family) for key in keys]
    return [(name, layer) for layer, name in enumerate(names) if name is not None]


# --- ours to theirs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of theirs that is filled with one of ours, or with a part of it."""

    key: str
    layer: int | None
    """Our layer, if the key is for all layers."""
    begin: int = 0
    """First row of the part."""
    size: int | None = None
    """Rows of the part; None: ours is not split."""


def has_axis_of_layers(config: TransformerConfig) -> bool:
    """Whether all layers are in one tensor: Megatron core keeps them apart in a hybrid and a Retro,
    and if --moe-layer-freq is more than 1 or a list."""
    if config.model_type in ("mamba", "retro"):
        return False
    freq = config.experts.moe_layer_freq
    return not config.experts.enabled or (freq.isdecimal() and int(freq) == 1)


def places_of(
    name: str, config: TransformerConfig, transformer_impl: TransformerImpl
) -> Iterator[Place]:
    """The tensors of theirs that one of our parameters fills.

    transformer_impl: whose layers Megatron-LM builds. Local layers differ only in those with
    experts, whose norm they name as that of a dense layer."""
    layer = layer_of(name) if has_axis_of_layers(config) else None
    for key in _keys(name, config, transformer_impl):
        if layer is not None:
            stack = stack_of(name)
            key = stack + key.removeprefix(f"{stack}{layer}.")
        letters = mamba_names.letters_of(key)
        if not letters:
            yield Place(key, layer)
            continue
        begin, sizes = 0, cut_of(name, config)
        assert isinstance(sizes, tuple), name
        for letter, size in zip(letters, sizes, strict=True):
            yield Place(f"{key}.{letter}", layer, begin, size)
            begin += size


def _keys(
    name: str, config: TransformerConfig, transformer_impl: TransformerImpl
) -> tuple[str, ...]:
    """Keys with numbers of layers."""
    engine = "transformer_engine"  # whose names both kinds of layers have in this format
    theirs = their_name(
        name,
        engine,
        config.model_type,
        in_mixture=transformer_impl == engine and is_in_mixture(name, config),
        latents=config.latent.enabled,
    )
    return sharded_name(theirs), *repeated_names(name, engine, config.model_type)
