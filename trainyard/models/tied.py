"""A word embedding that is also the output layer.

On one stage it is one parameter. A last stage without the embedding holds a copy, which starts with
the same values and takes the same steps, since the gradients of both are summed. Norms count the
pair once, and checkpoints save it once, under the name of the original."""

from __future__ import annotations

from torch import Tensor, nn

EMBEDDING = "embedding.word_embeddings.weight"
"""Name of the original."""

_COPY = "_trainyard_copy_of"
_SHARED = "_trainyard_shared_embedding"


def mark_copy(parameter: nn.Parameter, original: str = EMBEDDING) -> None:
    """Mark `parameter` as a copy of another stage's `original`."""
    setattr(parameter, _COPY, original)
    setattr(parameter, _SHARED, True)


def mark_shared(parameter: nn.Parameter) -> None:
    """Mark a parameter of which another stage may hold a copy."""
    setattr(parameter, _SHARED, True)


def copy_of(parameter: Tensor) -> str | None:
    """Name of the original of a copy; None for an original."""
    found: str | None = getattr(parameter, _COPY, None)
    return found


def is_copy(parameter: Tensor) -> bool:
    """Whether a parameter only repeats what another stage holds."""
    return copy_of(parameter) is not None


def shared_embedding(model: nn.Module) -> nn.Parameter | None:
    """The parameter of this stage, original or copy, whose gradient is summed over the first and
    last stage; None on other stages and for an untied output layer."""
    for parameter in model.parameters():
        if getattr(parameter, _SHARED, False):
            return parameter
    return None
