"""The vocabulary cut over tensor-parallel ranks: embedding, and cross entropy on cut logits.

s sequence, b batch, h hidden, V padded vocabulary, n tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.parallel.model import ModelParallel
from trainyard.parallel.sharding import even_shard, mark_shard
from trainyard.parallel.tensor.cross_entropy import lean_cross_entropy
from trainyard.parallel.tensor.mappings import reduce_from_tp, reduce_scatter_to_sp


class VocabParallelEmbedding(nn.Module):
    """Rows looked up by number; rank r holds rows r V/n to (r + 1) V/n - 1. weight: (V / n, h)."""

    def __init__(self, num_rows: int, width: int, *, parallel: ModelParallel) -> None:
        super().__init__()
        self.parallel = parallel
        size, rank = parallel.tp_size, parallel.tp_rank
        self.weight = nn.Parameter(torch.empty(num_rows // size, width))
        if parallel.tp is not None:
            mark_shard(self.weight, even_shard((num_rows, width), 0, size, rank))

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (s, b) int64, equal on all ranks. Returns (s, b, h), (s / n, b, h) under sequence
        parallelism. The sum over ranks has one summand that is not zero, so it is exact."""
        return vocab_parallel_embedding(ids, self.weight, self.parallel)


def vocab_parallel_embedding(ids: Tensor, weight: Tensor, parallel: ModelParallel) -> Tensor:
    """`VocabParallelEmbedding` with the given rows."""
    if parallel.tp is None:
        return functional.embedding(ids, weight)
    num_rows = weight.shape[0]
    local = ids - parallel.tp_rank * num_rows
    elsewhere = (local < 0) | (local >= num_rows)
    rows = functional.embedding(local.masked_fill(elsewhere, 0), weight)
    rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
    if parallel.sequence_parallel:
        return reduce_scatter_to_sp(rows, parallel.tp)
    return reduce_from_tp(rows, parallel.tp)


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, parallel: ModelParallel, vocab_size: int | None = None
) -> Tensor:
    """-log softmax(logits)[label] in nats, (s, b) fp32, equal on all tensor-parallel ranks.

    logits: (s, b, V / n), whose memory the backward pass takes for their gradient, so nothing may
    read them after it. labels: (s, b) int64, numbers in the whole vocabulary. vocab_size: the
    true vocabulary size; logits from it on are padding, outside the softmax, with a gradient of
    zero. Unset: V.
    fp32 logits of one rank alone without padding use torch's own kernel, for bit-equality with
    earlier runs."""
    is_padded = vocab_size is not None and vocab_size < logits.shape[-1] * parallel.tp_size
    if parallel.tp is None and logits.dtype == torch.float32 and not is_padded:
        flat = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return flat.view(labels.shape)
    return lean_cross_entropy(logits, labels, parallel, vocab_size)
