"""Activations that are computed again in the backward pass instead of being kept.

What is computed again gives the same bits: dropout on the residual stream is a function of seed and
place, and the generators that attention dropout draws from are put back.

    selective   core_attn   scores and their softmax: kept are q, k, v          (arXiv:2205.05198)
                mlp         all of the MLP: kept is its input
                layernorm   the normalised input of a matrix: kept is the norm's own input
    full        whole layers: kept is the residual stream before each, or before each group"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from trainyard.models.config import TransformerConfig

T = TypeVar("T")


def recomputed(fn: Callable[..., T], *args: Any, draws: bool) -> T:
    """fn(*args), of which only the arguments are kept for the backward pass.

    draws: fn takes random numbers from torch's generators, whose state is then kept as well."""
    result: T = checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=draws)
    return result


class View(NamedTuple):
    """How a tensor looks at the storage of another."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def forgetting_norm(norm: nn.Module, matrices: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """matrices(norm(x)), where what they keep of the normalised tensor is not kept, but the way to
    it: the norm is computed again."""
    normalised: Tensor = norm(x)
    storage = normalised.untyped_storage().data_ptr()

    def forget(saved: Tensor) -> Tensor | View:
        if saved.untyped_storage().data_ptr() != storage:
            return saved
        return View(saved.shape, saved.stride(), int(saved.storage_offset()))

    def remember(kept: Tensor | View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return torch.as_strided(norm(x), *kept)

    with saved_tensors_hooks(forget, remember):
        return matrices(normalised)


def layer_groups(config: TransformerConfig, layers: Iterable[T]) -> Iterator[tuple[list[T], bool]]:
    """The layers of a stage in the groups that run as one, each with whether it is recomputed."""
    remaining = iter(layers)
    size = config.recompute_num_layers or 1
    if config.recompute == "full" and config.recompute_method != "block":
        while group := list(islice(remaining, size)):
            yield group, True
        return
    first = size if config.recompute == "full" else 0
    for layer in islice(remaining, first):
        yield [layer], True
    for layer in remaining:
        yield [layer], False
