"""The output layer of models whose vocabulary has a bias: BERT, T5.

s sequence (this rank's part of it), b batch, h hidden, n tensor-parallel ranks, V padded
vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainyard.models.config import TransformerConfig
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.sharding import even_shard, mark_shard
from trainyard.parallel.tensor.overlap import column_linear


class OutputLayer(nn.Module):
    """Logits of the vocabulary, with a weight that may be the embedding's."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        parallel: ModelParallel,
        *,
        has_weight: bool,
        has_bias: bool = True,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        size, rank, h = parallel.tp_size, parallel.tp_rank, config.hidden_size
        self.weight: nn.Parameter | None = None
        if has_weight:
            self.weight = nn.Parameter(torch.empty(vocab_size // size, h))
        self.bias: nn.Parameter | None = None
        if has_bias:
            self.bias = nn.Parameter(torch.empty(vocab_size // size))
        if parallel.tp is not None:
            if self.bias is not None:
                mark_shard(self.bias, even_shard((vocab_size,), 0, size, rank))
            if self.weight is not None:
                mark_shard(self.weight, even_shard((vocab_size, h), 0, size, rank))

    def forward(self, hidden: Tensor, tied: Tensor | None) -> Tensor:
        """hidden: (s, b, h), tied: (V / n, h) where there is no weight here. Returns (s, b, V / n)
        of the whole sequence."""
        weight = tied if self.weight is None else self.weight
        assert weight is not None
        return column_linear(hidden, weight, self.bias, self.parallel)
