"""Embedding of tokens, plus learned positions and token types if the model has them."""

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
    """Word embedding, plus position embedding if learned and the embedding of token types if there
    are any. Dropout follows in the model."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        parallel: ModelParallel = ALONE,
        num_tokentypes: int = 0,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, config.hidden_size, parallel=parallel
        )
        self.position_embeddings: Table | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = self._table(config.positions, config.hidden_size)
        self.tokentype_embeddings: Table | None = None
        if num_tokentypes:
            self.tokentype_embeddings = self._table(num_tokentypes, config.hidden_size)

    def _table(self, num_rows: int, width: int) -> Table:
        table = Table(num_rows, width)
        if self.parallel.sequence_parallel:
            mark_partial_grad(table.weight)
        return table

    def forward(
        self, tokens: Tensor, positions: Tensor, token_types: Tensor | None = None
    ) -> Tensor:
        """tokens, token_types: (b, s), positions: (b, s) or (1, s). token_types: unset: all 0.
        Returns (s, b, h), its part of s under sequence parallelism."""
        x: Tensor = self.word_embeddings(tokens.t())
        if self.position_embeddings is not None:
            places = of_sequence_part(positions.t(), self.parallel)
            x = x + self.position_embeddings(places)
        if self.tokentype_embeddings is not None:
            types = torch.zeros_like(tokens) if token_types is None else token_types
            x = x + self.tokentype_embeddings(of_sequence_part(types.t(), self.parallel))
        return x
