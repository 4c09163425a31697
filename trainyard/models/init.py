"""Initial values of a model's parameters.

Each tensor is drawn whole, in fp32 on the CPU, from a generator seeded by the seed and its name:
block of rows by block of rows, of which a rank keeps its part. Of the stacked matrices of experts,
each is drawn for itself, from its name and its number. The values do not depend on the
order of drawing, the device or the parallel layout, and a rank never holds more than its part and
one block. Rows of the vocabulary are drawn in order, so that a token's row does not depend on the
padding that follows, which tensor parallelism changes.

Weights are N(0, std), those that add to the residual stream N(0, std / sqrt(2 L)) (GPT-2), or
uniform by Xavier's rule; biases are 0 and norms 1. Parameters of a state space have rules of their
own (`mamba.initial`)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from trainyard.models.config import TransformerConfig
from trainyard.models.mamba.initial import drawn_by, is_one
from trainyard.models.tied import copy_of
from trainyard.parallel.sharding import Cut, Shard, ShardBox, held_part

OUTPUT_PROJECTIONS = (
    "self_attention.linear_proj.weight",
    "cross_attention.linear_proj.weight",
    "cross_attention.attn.linear_proj.weight",
    "mlp.linear_fc2.weight",
    "mlp.experts.linear_fc2.weight",
    "mlp.shared_experts.linear_fc2.weight",
    "mixer.out_proj.weight",
)
TABLES = (
    "word_embeddings.weight",
    "position_embeddings.weight",
    "tokentype_embeddings.weight",
)
NORMS = (
    *("layernorm.weight", "layer_norm.weight", "layernorm.norm.weight"),
    *("enorm.weight", "hnorm.weight"),
)

EXPERT_DIMS = 3
"""Dims of the stacked matrices of experts, (experts, out, in)."""
BLOCK_NUMBERS = 1 << 22
"""Numbers drawn at once."""
STRIDE = 16
"""torch draws normal numbers on the CPU 16 at a time; a whole stride is independent of the next."""


class ConfiguredModel(Protocol):
    """A built-in model, or the part of it that a stage holds."""

    @property
    def config(self) -> TransformerConfig:
        """Its options."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As of an nn.Module."""


def init_parameters(model: ConfiguredModel, seed: int) -> None:
    """Fill every parameter of `model`, or of this rank's part of it, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            target, shard = held_part(parameter)
            _fill(target, shard, copy_of(parameter) or name, model.config, seed)


def init_module(module: nn.Module, config: TransformerConfig, seed: int) -> None:
    """Fill every parameter of a user's model: biases 0, other vectors 1, matrices
    N(0, --init-method-std), drawn by name so that the layout does not matter."""
    with torch.no_grad():
        for own_name, parameter in module.named_parameters():
            name = copy_of(parameter) or own_name
            target, shard = held_part(parameter)
            if parameter.ndim == 1 and _constant(name, config) is None and drawn_by(name) is None:
                target.fill_(1.0)
            else:
                _fill(target, shard, name, config, seed)


def draw_parameter(name: str, shape: torch.Size, config: TransformerConfig, seed: int) -> Tensor:
    """The whole initial value of the parameter called `name`, fp32 on the CPU."""
    whole = torch.empty(shape, device="cpu", dtype=torch.float32)
    _fill(whole, None, name, config, seed)
    return whole


def draw_rows(
    name: str, shape: tuple[int, ...], rows: range, config: TransformerConfig, seed: int
) -> Tensor:
    """These rows of the initial weight called `name`, fp32 on the CPU; allocates no more than the
    rows and a block."""
    target = torch.empty(len(rows), *shape[1:], dtype=torch.float32, device="cpu")
    part = Shard(shape, (Cut(0, (ShardBox(0, rows.start, len(rows)),)),))
    for start, block in _blocks(name, shape, config, seed):
        _take(target, part, start, block)
    return target


def _fill(
    target: Tensor, shard: Shard | None, name: str, config: TransformerConfig, seed: int
) -> None:
    constant = _constant(name, config)
    if constant is not None:
        target.fill_(constant)
        return
    if not target.numel():  # fully sharded over more ranks than it has rows
        return
    shard = shard or _whole(tuple(target.shape))
    if target.ndim == EXPERT_DIMS and drawn_by(name) is None:
        _fill_experts(target, shard, name, config, seed)
        return
    for start, block in _blocks(name, shard.shape, config, seed):
        _take(target, shard, start, block)


def _fill_experts(
    target: Tensor, shard: Shard, name: str, config: TransformerConfig, seed: int
) -> None:
    """Fill stacked matrices, each from a generator of its own."""
    matrix = [Cut(cut.dim - 1, cut.pieces) for cut in shard.cuts if cut.dim > 0]
    part = Shard(shard.shape[1:], tuple(matrix) or _whole(shard.shape[1:]).cuts)
    (held,) = next((c.pieces for c in shard.cuts if c.dim == 0), _whole(shard.shape).cuts[0].pieces)
    for place, expert in enumerate(range(held.whole, held.whole + held.length)):
        generator = named_generator(f"{name}.{expert}", seed)
        for start, block in _blocks(name, part.shape, config, seed, generator):
            _take(target[place], part, start, block)


def _constant(name: str, config: TransformerConfig) -> float | None:
    if drawn_by(name) is not None:
        return None
    if is_one(name):
        return 1.0
    if name.endswith(".bias"):
        return 0.0
    if name.endswith(NORMS):
        return 0.0 if config.apply_layernorm_1p else 1.0
    return None


def _blocks(
    name: str,
    shape: tuple[int, ...],
    config: TransformerConfig,
    seed: int,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """The whole tensor from its first row on, in blocks of rows, each with its first row's number.

    Draws up to a whole stride and drops the surplus, so that the values of the last row do not
    depend on what follows it."""
    generator = generator or named_generator(name, seed)
    row = math.prod(shape[1:])
    rows_at_once = max(BLOCK_NUMBERS // row // STRIDE, 1) * STRIDE
    for start in range(0, shape[0], rows_at_once):
        rows = min(rows_at_once, shape[0] - start)
        numbers = -(-rows * row // STRIDE) * STRIDE
        block = torch.empty(numbers, device="cpu", dtype=torch.float32)
        _draw(block, name, shape, config, generator)
        yield start, block[: rows * row].view(rows, *shape[1:])


def _draw(
    block: Tensor,
    name: str,
    shape: tuple[int, ...],
    config: TransformerConfig,
    generator: torch.Generator,
) -> None:
    bound, rule = xavier_bound(name, shape, config), drawn_by(name)
    if rule is not None:
        rule(block, generator)
    elif bound is None:
        nn.init.normal_(block, 0.0, weight_std(name, config), generator=generator)
    else:
        nn.init.uniform_(block, -bound, bound, generator=generator)


def _take(target: Tensor, shard: Shard, start: int, block: Tensor) -> None:
    """Copy the shard's part of a block whose first row is `start`."""
    end = start + block.shape[0]
    for offset, index in shard.boxes():
        part = target[index]
        first, last = max(start, offset[0]), min(end, offset[0] + part.shape[0])
        if first >= last:
            continue
        source = block[first - start : last - start]
        for dim in range(1, part.ndim):
            source = source.narrow(dim, offset[dim], part.shape[dim])
        part[first - offset[0] : last - offset[0]].copy_(source)


def _whole(shape: tuple[int, ...]) -> Shard:
    return Shard(shape, (Cut(0, (ShardBox(0, 0, shape[0]),)),))


def weight_std(name: str, config: TransformerConfig) -> float:
    """Standard deviation of the weight called `name`."""
    if name.endswith(OUTPUT_PROJECTIONS):
        return config.init_method_std / math.sqrt(config.residual_branches)
    if name.endswith(TABLES) and config.embedding_init_method_std is not None:
        return config.embedding_init_method_std
    return config.init_method_std


def xavier_bound(name: str, shape: tuple[int, ...], config: TransformerConfig) -> float | None:
    """Bound of a uniform draw under --init-method-xavier-uniform; None where it does not apply.

    It applies to the matrices of layers. Those of the vocabulary stay normal, since their bound
    would depend on the padding."""
    in_layer = ".layers." in name and len(shape) == 2
    if not config.init_method_xavier_uniform or not in_layer:
        return None
    return math.sqrt(6.0 / (shape[0] + shape[1]))


def named_generator(name: str, seed: int) -> torch.Generator:
    """A CPU generator that depends on seed and name alone."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device="cpu")
    generator.manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))
    return generator
