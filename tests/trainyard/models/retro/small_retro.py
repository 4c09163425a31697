"""Small Retros and neighbours, for the tests of models and trainings."""

from __future__ import annotations

from typing import Any

import torch

from trainyard.models.init import init_parameters
from trainyard.models.retro.chunks import Neighbors
from trainyard.models.retro.config import RetroConfig
from trainyard.models.retro.model import RetroModel

ROWS, LENGTH, CHUNK = 64, 16, 4
SMALL_RETRO: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "retro_chunk_length": CHUNK,
    "retro_cross_attention_layers": (2, 4),
    "init_method_std": 0.2,
}


def build(true_vocab_size: int | None = None, **options: Any) -> RetroModel:
    """A model with weights, in evaluation."""
    config = RetroConfig(**SMALL_RETRO | options)
    model = RetroModel(config, ROWS, true_vocab_size=true_vocab_size)
    init_parameters(model, 1)
    return model.eval()


def some_tokens(batch: int = 2, seed: int = 3, length: int = LENGTH) -> torch.Tensor:
    """(b, s)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(ROWS, (batch, length), generator=generator)


def some_neighbors(config: RetroConfig, batch: int = 2, seed: int = 5) -> Neighbors:
    """Of all lengths; some chunks have none."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, config.num_chunks, config.retro_num_neighbors)
    tokens = torch.randint(ROWS, (*shape, config.retrieved_length), generator=generator)
    lengths = torch.randint(config.retrieved_length + 1, shape, generator=generator)
    lengths[0, 0, 0] = config.retrieved_length
    lengths[-1, 1] = 0
    return Neighbors(tokens, lengths)
