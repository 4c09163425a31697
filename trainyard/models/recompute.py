"""Activation recomputation in the backward pass.

Recomputing gives the same bits: dropout on the residual stream is a function of seed and place, and
the state of the generators that attention dropout draws from is restored.

    selective   core_attn   scores and their softmax: kept are q, k, v          (arXiv:2205.05198)
                mlp         all of the MLP: kept is its input
                layernorm   the normalised input of a matrix: kept is the norm's own input
    full        whole layers: kept is the residual stream before each, or before each group"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from trainyard.models.config import TransformerConfig

T = TypeVar("T")


def recomputed(fn: Callable[..., T], *args: Any, draws: bool) -> T:
    """fn(*args), keeping only the arguments for the backward pass.

    draws: fn draws from torch's generators, so their state is kept as well."""
    result: T
    if torch.compiler.is_compiling():  # takes no contexts, and what counts tokens is not compiled
        result = checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=draws)
        return result
    result = checkpoint(
        fn, *args, use_reentrant=False, preserve_rng_state=draws, context_fn=_contexts
    )
    return result


_STATE = threading.local()  # autograd recomputes in a thread of each device


def is_recomputing() -> bool:
    """Whether this forward pass repeats an earlier one for the backward pass: what counts tokens
    must not count them again."""
    return getattr(_STATE, "depth", 0) > 0


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _recomputing()


@contextmanager
def _recomputing() -> Iterator[None]:
    _STATE.depth = getattr(_STATE, "depth", 0) + 1
    try:
        yield
    finally:
        _STATE.depth -= 1


class View(NamedTuple):
    """Geometry of a tensor in the storage of another."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def recomputed_norm(norm: nn.Module, matrices: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """matrices(norm(x)), recomputing the norm in the backward pass instead of keeping its
    output."""
    normalised: Tensor = norm(x)
    storage = normalised.untyped_storage().data_ptr()

    def drop(saved: Tensor) -> Tensor | View:
        if saved.untyped_storage().data_ptr() != storage:
            return saved
        return View(saved.shape, saved.stride(), int(saved.storage_offset()))

    def restore(kept: Tensor | View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return torch.as_strided(norm(x), *kept)

    with saved_tensors_hooks(drop, restore):
        return matrices(normalised)


def layer_groups(config: TransformerConfig, layers: Iterable[T]) -> Iterator[tuple[list[T], bool]]:
    """The layers of a stage in groups that run as one: (layers, whether they are recomputed)."""
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
