"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): layers behind the last one
that predict the tokens after the next, for training alone.

Depth k takes the hidden states of depth k - 1, those of the model for k = 1, and the tokens k
places later, and its output predicts the token after those. Embedding and output layer are the
model's.

s sequence (this rank's part of it), b batch, h hidden, D depths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainyard.models.block import TransformerLayer
from trainyard.models.config import TransformerConfig
from trainyard.models.layer_inputs import DropoutPlaces, LayerInputs
from trainyard.models.norm import build_norm
from trainyard.models.recompute import recomputed
from trainyard.parallel.context.split import cut_sequence, gather_whole
from trainyard.parallel.invariant_dropout import DropoutPlace, cut_free_dropout
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.tensor.linear import WholeLinear
from trainyard.parallel.tensor.vocab import VocabParallelEmbedding, vocab_parallel_embedding

OF_EMBEDDING = 0
"""Number of the dropout of the embedded tokens, at a place of its own."""


class Shifted(NamedTuple):
    """A micro-batch this many places later; places behind the end of a sequence or, where attention
    stops at documents, of a document have no loss. (b, s) each, this rank's part."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    num_tokens: Tensor
    """() fp32, tokens with a loss, over the whole sequence."""


def shifted(batch: Mapping[str, Tensor], depths: int, cp: ProcessGroup | None) -> Iterator[Shifted]:
    """The micro-batch 1, 2, ... `depths` places later. batch: tokens, labels, loss_mask, (b, s) of
    this rank; cu_seqlens (b, w) of the whole sequence, if attention stops at documents. cp: ranks
    that share sequences."""
    parts = [batch[key] for key in ("tokens", "labels", "loss_mask")]
    tokens, labels, mask = (gather_whole(part, 1, cp) for part in parts)
    bounds = batch.get("cu_seqlens")
    documents = torch.zeros_like(tokens)
    if bounds is not None:
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=bounds.dtype)
        documents = torch.searchsorted(
            bounds.contiguous(), places.expand(tokens.shape[0], -1).contiguous(), right=True
        )
    size = 1 if cp is None else cp.size()
    rank = 0 if cp is None else cp.rank()
    for depth in range(1, depths + 1):
        later = _later(mask, depth) * (_later(documents, depth, -1) == documents)
        moved = (_later(tokens, depth), _later(labels, depth), later)
        own = [cut_sequence(x, 1, size, rank) for x in moved]
        yield Shifted(own[0], own[1], own[2], num_tokens=later.sum())


def _later(x: Tensor, places: int, fill: int = 0) -> Tensor:
    """x this many places later, filled up at its end."""
    return torch.cat((x[:, places:], x.new_full((x.shape[0], places), fill)), dim=1)


class PredictionLayer(nn.Module):
    """One depth: norms of the embedded tokens (enorm) and of the hidden states (hnorm), a matrix
    that joins them (eh_proj), a transformer layer, a norm."""

    def __init__(self, config: TransformerConfig, layer: int, parallel: ModelParallel) -> None:
        """layer: number of the transformer layer, behind those of the model."""
        super().__init__()
        h = config.hidden_size
        self.wide = config.fp32_residual_connection
        self.enorm = build_norm(config, parallel)
        self.hnorm = build_norm(config, parallel)
        self.eh_proj = WholeLinear(2 * h, h, parallel)
        self.transformer_layer = TransformerLayer(config, layer, parallel)
        self.final_layernorm = build_norm(config, parallel)

    def forward(
        self, hidden: Tensor, embedded: Tensor, inputs: LayerInputs, place: DropoutPlace | None
    ) -> Tensor:
        """hidden, embedded: (s, b, h). Returns the same shape, normalised."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        x = self.transformer_layer(x.float() if self.wide else x, inputs, place)
        out: Tensor = self.final_layernorm(x)
        return out


class MultiTokenPrediction(nn.Module):
    """The layers of all depths, on the stage with the output layer."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        parallel: ModelParallel,
        *,
        has_embedding: bool,
    ) -> None:
        """has_embedding: it holds a copy of the embedding, as nothing else of this stage does."""
        super().__init__()
        self.config, self.parallel = config, parallel
        self.depths = config.mtp.mtp_num_layers or 0
        self.word_embeddings: VocabParallelEmbedding | None = None
        if has_embedding:
            self.word_embeddings = VocabParallelEmbedding(
                vocab_size, config.hidden_size, parallel=parallel
            )
        self.layers = nn.ModuleDict(
            {
                str(depth): PredictionLayer(config, config.num_layers + depth, parallel)
                for depth in range(self.depths)
            }
        )

    def hidden_states(
        self,
        hidden: Tensor,
        tokens: list[Tensor],
        table: Tensor,
        inputs: LayerInputs,
        places: DropoutPlaces | None,
    ) -> Iterator[Tensor]:
        """Inputs of the output layer, (s, b, h), depth by depth.

        hidden: of the model, after its last norm. tokens: (b, s) of each depth. table: rows of the
        embedding, this rank's. places: of dropout: those of the layers, then those of the embedded
        tokens; None disables it."""
        again = self.config.recompute == "full" and self.training and torch.is_grad_enabled()
        for depth, layer in enumerate(self.layers.values()):
            embedded = vocab_parallel_embedding(tokens[depth].t(), table, self.parallel)
            place = None
            if places is not None:
                place, at = places.of_layer(depth), places.of_layer(self.depths + depth)
                embedded = cut_free_dropout(embedded, self.config.hidden_dropout, at, OF_EMBEDDING)
            if again:
                draws = self.config.attention_dropout > 0
                hidden = recomputed(layer, hidden, embedded, inputs, place, draws=draws)
            else:
                hidden = layer(hidden, embedded, inputs, place)
            yield hidden
