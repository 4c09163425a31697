"""Tokens, and learned positions where the model has them, to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.models.config import GPTConfig


class Table(nn.Module):
    """Rows looked up by number; left unfilled, see linear.py."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (...). Returns (..., width)."""
        return functional.embedding(ids, self.weight)


class Embedding(nn.Module):
    """Word embedding, plus position embedding if learned, then dropout."""

    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.word_embeddings = Table(vocab_size, config.hidden_size)
        self.position_embeddings: Table | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = Table(config.positions, config.hidden_size)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens: (b, s), positions: (b, s) or (1, s). Returns (s, b, h)."""
        x: Tensor = self.word_embeddings(tokens.t())
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions.t())
        return functional.dropout(x, self.dropout, self.training)
