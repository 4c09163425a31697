"""Encodes texts of different lengths without padding: end to end in one row.

All but attention looks at each token alone. Attention takes the texts in groups of equal length, as
views of that row, by the kernel that the layer has chosen for whole sequences. So no kernel sees
padding, a matrix of a mask or packed documents.

T tokens of all texts, n heads, d head channels, g texts of a group, s their tokens, h hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from trainyard.attention.masks import FULL, AttentionMask
from trainyard.models.attention import CoreAttention, SelfAttention
from trainyard.models.bert.model import BertModel

Group = tuple[int, int]
"""Number of texts that follow each other, and their equal length in tokens."""


def groups_of(lengths: Sequence[int]) -> tuple[Group, ...]:
    """Runs of equal lengths."""
    return tuple((len(list(run)), length) for length, run in groupby(lengths))


@dataclass(frozen=True, slots=True)
class RaggedMask(AttentionMask):
    """Every token sees the tokens of its text."""

    groups: tuple[Group, ...] = ()


class RaggedAttention(nn.Module):
    """The attention of a layer over a row of texts."""

    def __init__(self, core: CoreAttention) -> None:
        super().__init__()
        self.core = core

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: RaggedMask, bias: Tensor | None = None
    ) -> Tensor:
        """q, k, v: (1, n, T, d). Returns (1, n, T, d)."""
        assert bias is None, "positions that bias the scores know one sequence"
        contexts, begin = [], 0
        for count, length in mask.groups:
            end = begin + count * length
            of_group = (
                x[0, :, begin:end].unflatten(1, (count, length)).transpose(0, 1) for x in (q, k, v)
            )  # (g, n, s, d)
            context = self.core(*of_group, FULL)
            contexts.append(context.transpose(1, 2).flatten(0, 1))  # (g s, n, d)
            begin = end
        whole = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
        return whole.transpose(0, 1).unsqueeze(0)


def make_ragged(model: BertModel) -> None:
    """Let the layers of a model take a `RaggedMask`, and no other."""
    for module in model.encoder.modules():
        if isinstance(module, SelfAttention) and isinstance(module.core_attention, CoreAttention):
            module.register_module("core_attention", RaggedAttention(module.core_attention))


def encode_ragged(
    model: BertModel, tokens: Tensor, positions: Tensor, groups: tuple[Group, ...]
) -> Tensor:
    """Hidden states (T, h) after the last layer and norm.

    tokens: (T,) of all texts, end to end. positions: (T,) of each token in its text."""
    mask = RaggedMask(causal=False, groups=groups)
    hidden = model.run_layers(
        model.encoder, None, tokens.unsqueeze(0), mask, position_ids=positions.unsqueeze(0)
    )
    return hidden.squeeze(1)
