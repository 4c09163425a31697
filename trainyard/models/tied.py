"""The word embedding that serves as output layer as well.

On one stage it is one parameter. On a last stage without the embedding it is a copy, which starts
with the same values and takes the same steps: the gradients of both are added up. A copy counts
once in norms and is saved once, under the name of the original."""

from __future__ import annotations

from torch import Tensor, nn

EMBEDDING = "embedding.word_embeddings.weight"
"""Name of the original."""

_COPY = "_trainyard_copy_of"
_SHARED = "_trainyard_shared_embedding"


def mark_copy(parameter: nn.Parameter, original: str = EMBEDDING) -> None:
    """Note that the values of `parameter` are those of another stage's `original`."""
    setattr(parameter, _COPY, original)
    setattr(parameter, _SHARED, True)


def mark_shared(parameter: nn.Parameter) -> None:
    """Note that another stage has a copy, or may have one, of this parameter."""
    setattr(parameter, _SHARED, True)


def copy_of(parameter: Tensor) -> str | None:
    """Name of what a parameter is a copy of; None for an original."""
    found: str | None = getattr(parameter, _COPY, None)
    return found


def is_copy(parameter: Tensor) -> bool:
    """Whether a parameter only repeats what another stage holds."""
    return copy_of(parameter) is not None


def shared_embedding(model: nn.Module) -> nn.Parameter | None:
    """The parameter here, original or copy, whose gradient is added up over the first and the last
    stage; None on a stage with neither, and where the output layer has weights of its own."""
    for parameter in model.parameters():
        if getattr(parameter, _SHARED, False):
            return parameter
    return None
