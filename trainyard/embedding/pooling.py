"""From the hidden states of a text's tokens to its vector, in fp32.

g texts of equal length, s their tokens, h hidden."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.embedding.config import Pooling
from trainyard.embedding.ragged import Group


def mean_of_text(hidden: Tensor) -> Tensor:
    """Mean over all tokens but the first and the last."""
    return hidden[:, 1:-1].mean(dim=1, dtype=torch.float32)


def mean_of_all(hidden: Tensor) -> Tensor:
    """Mean over all tokens."""
    return hidden.mean(dim=1, dtype=torch.float32)


def first(hidden: Tensor) -> Tensor:
    """The first token."""
    return hidden[:, 0].float()


POOLINGS: dict[Pooling, Callable[[Tensor], Tensor]] = {
    "mean": mean_of_text,
    "mean-all": mean_of_all,
    "cls": first,
}
"""(g, s, h) hidden states to (g, h) vectors."""


def pool(hidden: Tensor, groups: Sequence[Group], pooling: Pooling, normalize: bool) -> Tensor:
    """(texts, h) fp32 vectors. hidden: (T, h) of texts end to end."""
    sizes = [count * length for count, length in groups]
    parts = [
        POOLINGS[pooling](part.unflatten(0, (count, length)))
        for part, (count, length) in zip(hidden.split(sizes), groups, strict=True)
    ]
    vectors = torch.cat(parts)
    return functional.normalize(vectors, dim=1) if normalize else vectors
