"""Embedding of tokens, plus learned positions if the model has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.models.config import TransformerConfig
from trainyard.parallel.invariant_dropout import of_sequence_part
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.sharding import mark_partial_grad
from trainyard.parallel.tensor.vocab import VocabParallelEmbedding


class Table(nn.Module):
    """An embedding table that is whole on every rank."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (...). Returns (..., width)."""
        return functional.embedding(ids, self.weight)


class Embedding(nn.Module):
    """Word embedding, plus position embedding if learned. Dropout follows in the model."""

    def __init__(
        self, config: TransformerConfig, vocab_size: int, parallel: ModelParallel = ALONE
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, config.hidden_size, parallel=parallel
        )
        self.position_embeddings: Table | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = Table(config.positions, config.hidden_size)
            if parallel.sequence_parallel:
                mark_partial_grad(self.position_embeddings.weight)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens: (b, s), positions: (b, s) or (1, s). Returns (s, b, h), its part of s under
        sequence parallelism."""
        x: Tensor = self.word_embeddings(tokens.t())
        if self.position_embeddings is not None:
            places = of_sequence_part(positions.t(), self.parallel)
            x = x + self.position_embeddings(places)
        return x
