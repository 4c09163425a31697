"""Attention over sequences sharded over context-parallel ranks, with three kinds of communication
(`--cp-comm-type`):

p2p        keys and values travel a ring, overlapped with computation; plain causal or full
allgather  every rank gets all keys and values, of its group heads only; windows, documents
a2a        every rank gets all tokens of a share of the heads; windows, documents, any backend

b batch, n query heads, g key and value heads, s local tokens, d head channels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainyard.attention.base import AttentionBackend, Softmax
from trainyard.attention.blockwise import block_attention, causal_blocks
from trainyard.attention.masks import AttentionMask
from trainyard.attention.select import Selected
from trainyard.errors import ConfigError
from trainyard.parallel.config import ContextCommunication
from trainyard.parallel.context.ring_attention import ring_attention
from trainyard.parallel.context.split import (
    gather_sequences,
    heads_to_sequence,
    local_positions,
    piece_begins,
    sequence_to_heads,
)
from trainyard.parallel.model import ModelParallel, group_rank, group_size

ADVICE = "use --cp-comm-type allgather or a2a"


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """An `AttentionBackend` for sharded sequences; the mask is that of the whole sequence."""

    group: ProcessGroup
    comm_type: ContextCommunication
    backend: AttentionBackend
    kernel: str
    """Of the backend, for parts of the keys: cudnn, flash, cpu or math."""

    @staticmethod
    def around(selected: Selected, parallel: ModelParallel) -> ContextAttention | None:
        """The selected backend, for sequences sharded over the ranks of `parallel`."""
        if selected.backend is None or selected.choice is None or parallel.cp is None:
            return None
        kernel = selected.choice.kernel
        return ContextAttention(parallel.cp, parallel.cp_comm_type, selected.backend, kernel)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax
    ) -> Tensor:
        """q: (b, n, s, d), k, v: (b, g, s, d), the local part. Returns (b, n, s, d)."""
        assert mask.rules_only, "a dense mask does not know its part of the sequence"
        if self.comm_type == "a2a":
            return self._exchanged(q, k, v, mask, softmax)
        if self.comm_type == "allgather":
            return self._gathered(q, k, v, mask, softmax)
        if not mask.plain:
            raise ConfigError(
                "--cp-comm-type p2p sends keys around a ring and supports only causal attention; "
                "for packed "
                f"documents or --window-size {ADVICE}"
            )
        return ring_attention(
            q, k, v, self.group, kernel=self.kernel, causal=mask.causal, softmax=softmax
        )

    def _gathered(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax
    ) -> Tensor:
        size, rank, s = group_size(self.group), group_rank(self.group), q.shape[2]
        k, v = gather_sequences((k, v), self.group)
        if not mask.causal:
            if not mask.plain:
                places = local_positions(k.shape[2], size, rank, q.device)
                mask = replace(mask, positions=places.unsqueeze(0))
            return self.backend.attend(q, k, v, mask, softmax)
        half = s // 2
        early, late = piece_begins(half, size, rank)
        if mask.plain:
            blocks = causal_blocks(0, half, early) + causal_blocks(half, s, late)
            return block_attention(q, k, v, blocks, self.kernel, softmax)
        parts = []
        for rows, begin in ((slice(0, half), early), (slice(half, s), late)):
            end, first = begin + half, mask.first_key(begin)
            keys, values, part = k[:, :, first:end], v[:, :, first:end], mask.part(first, end)
            parts.append(self.backend.attend(q[:, :, rows], keys, values, part, softmax))
        return torch.cat(parts, dim=2)

    def _exchanged(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax
    ) -> Tensor:
        size, rank = group_size(self.group), group_rank(self.group)
        copies = copies_of_groups(k.shape[1], size)
        if copies > 1:
            k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
        q, k, v = sequence_to_heads((q, k, v), self.group)
        if softmax.sink is not None:
            softmax = softmax._replace(sink=softmax.sink.chunk(size)[rank])
        out = self.backend.attend(q, k, v, mask, softmax)
        return heads_to_sequence(out, self.group)


def copies_of_groups(groups: int, cp_size: int) -> int:
    """Copies of each key and value head so that every rank gets equally many.

    Query heads divisible by groups and by ranks are divisible by the copies as well."""
    return cp_size // math.gcd(groups, cp_size)


def check_context(
    comm_type: ContextCommunication, cp_size: int, heads: int, window: tuple[int, int] | None
) -> None:
    """Raise ConfigError, before anything is built, for what a communication type cannot do.

    heads: query heads of one tensor-parallel rank."""
    if cp_size == 1:
        return
    if comm_type == "p2p" and window is not None:
        raise ConfigError(
            "--cp-comm-type p2p (ring attention) does not support sliding windows; with "
            f"--window-size {ADVICE}"
        )
    if comm_type == "a2a" and heads % cp_size:
        raise ConfigError(
            f"--cp-comm-type a2a distributes heads: the {heads} of a rank (--num-attention-heads / "
            f"--tensor-model-parallel-size) must be divisible by --context-parallel-size "
            f"({cp_size}); use --cp-comm-type p2p or allgather"
        )
