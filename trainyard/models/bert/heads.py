"""What follows the encoder of a BERT: the head of hidden words, and that of the order of sentences.

s sequence (this rank's part of it), b batch, h hidden."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.models.bert.config import BertConfig
from trainyard.models.mlp import gelu, gelu_tanh
from trainyard.models.norm import build_norm
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.sharding import mark_partial_grad
from trainyard.parallel.tensor.mappings import reduce_from_tp


class Linear(nn.Module):
    """A matrix and a bias that are whole on every rank."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in). Returns (..., out)."""
        return functional.linear(x, self.weight, self.bias)


class LMHead(nn.Module):
    """dense, GELU, norm: the input of the output layer. GELU is exact here, as in Megatron-LM,
    unless --openai-gelu asks for its tanh form everywhere."""

    def __init__(self, config: BertConfig, parallel: ModelParallel) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        if parallel.sequence_parallel:
            for parameter in self.dense.parameters():
                mark_partial_grad(parameter)
        self.activation = gelu_tanh if config.openai_gelu else gelu
        self.layer_norm = build_norm(config, parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: (s, b, h). Returns the same shape."""
        out: Tensor = self.layer_norm(self.activation(self.dense(hidden)))
        return out


class Pooler(nn.Module):
    """tanh(dense(first token)), equal on all tensor-parallel ranks."""

    def __init__(self, config: BertConfig, parallel: ModelParallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: (s, b, h), this rank's part under sequence parallelism. Returns (b, h)."""
        first, parallel = hidden[0], self.parallel
        if parallel.sequence_parallel:  # the first rank has the first token
            mine = first if parallel.tp_rank == 0 else first * 0.0
            first = reduce_from_tp(mine, parallel.tp)
        return torch.tanh(self.dense(first))
