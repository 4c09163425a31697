"""Retro, or the part of it that a pipeline stage holds: tokens and neighbours in, logits or
per-token losses out.

Without neighbours it is the GPT of its decoder. Tensors are (s, b, h) inside and (b, s) in the
interface. Between pipeline stages the neighbours follow the hidden states of their sample: those of
the embedding up to the first layer with cross attention, the encoded ones behind it.

s sequence, b batch, l chunks, k neighbours, r tokens of a neighbour, h hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainyard.attention.masks import CAUSAL, AttentionMask, as_mask
from trainyard.models.attention import KVCache
from trainyard.models.block import Step, TransformerBlock, TransformerLayer
from trainyard.models.gpt.model import GPTModel
from trainyard.models.layer_inputs import DROPOUT_SEED, DropoutPlaces, LayerInputs
from trainyard.models.losses import Losses
from trainyard.models.pipeline_stage import WHOLE, PipelineStage
from trainyard.models.retro.chunks import (
    Neighbors,
    behind_sample,
    from_behind_sample,
    has_neighbors,
    own_tokens,
    retrieved_tokens,
)
from trainyard.models.retro.config import RetroConfig
from trainyard.models.retro.layers import NeighborInputs, RetroLayer, WithNeighbors
from trainyard.parallel.invariant_dropout import of_sequence_part
from trainyard.parallel.model import ALONE, ModelParallel

NEIGHBOR_TOKENS, NEIGHBOR_LENGTHS = "neighbor_tokens", "neighbor_lengths"
"""Keys of a batch: (b, l, k, r) and (b, l, k)."""

OF_NEIGHBORS = 0x5DEECE66D
"""Sets the seed of the encoder's dropout apart from the decoder's."""


class RetroBlock(TransformerBlock):
    """The layers of the decoder, some of which attend to neighbours."""

    def __init__(
        self,
        config: RetroConfig,
        parallel: ModelParallel = ALONE,
        pipeline_stage: PipelineStage = WHOLE,
    ) -> None:
        super().__init__(config, parallel, pipeline_stage, layer=_make_layer)
        if config.retro_no_final_layernorm:
            self.final_layernorm = None
        self.draws_in_encoder = config.retro_encoder_attention_dropout > 0

    def with_neighbors(
        self, state: WithNeighbors, inputs: LayerInputs, places: DropoutPlaces | None
    ) -> WithNeighbors:
        """The state after the layers of this stage, hidden states normalised on the last one."""
        hidden, neighbors, about = self.through_layers(state, inputs, places)
        return WithNeighbors(self.normalised(hidden), neighbors, about)

    def run(self, steps: Sequence[Step], state: Any, inputs: LayerInputs) -> Any:
        """The state after these layers: a residual stream alone, or with neighbours."""
        if isinstance(state, Tensor):
            return super().run(steps, state, inputs)
        for layer, place in steps:
            if isinstance(layer, RetroLayer):
                state = layer(state, inputs, place)
            else:
                state = state._replace(hidden=layer(state.hidden, inputs, place))
        return state

    @property
    def draws(self) -> bool:
        """Whether a layer draws from torch's generators."""
        return super().draws or self.draws_in_encoder


def _make_layer(config: RetroConfig, number: int, parallel: ModelParallel) -> nn.Module:
    has_cross_attention = number in config.cross_layers
    return (RetroLayer if has_cross_attention else TransformerLayer)(config, number, parallel)


class RetroModel(GPTModel):
    """A GPT that attends to neighbours of its chunks."""

    config: RetroConfig
    decoder: RetroBlock
    block_class: ClassVar[type[TransformerBlock]] = RetroBlock

    # --- the whole model ------------------------------------------------------------------

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        kv_cache: KVCache | None = None,
        attention_mask: AttentionMask | Tensor | None = None,
        neighbors: Neighbors | None = None,
    ) -> Tensor:
        """Logits (b, s, true_vocab_size) of the token after each of `tokens`, (b, s) int64.

        neighbors: of the first l chunks; s may be more than l m. Unset: as a GPT."""
        if neighbors is None:
            return super().forward(tokens, position_ids, kv_cache, attention_mask)
        assert kv_cache is None, "neighbours need the whole text"
        mask = as_mask(attention_mask)
        hidden = self._with_neighbors(None, tokens, position_ids, mask, None, neighbors)
        return self.logits(hidden).transpose(0, 1)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: AttentionMask | Tensor | None = None,
        dropout_seed: Tensor | None = None,
        neighbors: Neighbors | None = None,
    ) -> Tensor:
        """Cross entropy of each label in nats, (b, s) fp32, not masked and not averaged."""
        if neighbors is None:
            return super().loss(tokens, labels, position_ids, attention_mask, dropout_seed)
        mask = as_mask(attention_mask)
        hidden = self._with_neighbors(None, tokens, position_ids, mask, dropout_seed, neighbors)
        return self.losses(hidden, labels)

    # --- a part of it ---------------------------------------------------------------------

    def forward_step(self, hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor | Losses:
        """As that of a GPT, with neighbor_tokens (b, l, k, r) and neighbor_lengths (b, l, k) in the
        batch; between stages the neighbours follow, (s + l k r, b, h). A batch without them, as of
        instruction data, passes the decoder alone."""
        if NEIGHBOR_TOKENS not in batch:
            return super().forward_step(hidden, batch)
        bounds = batch.get("cu_seqlens")
        out = self._with_neighbors(
            hidden,
            batch["tokens"] if self.pipeline_stage.has_embedding else None,
            batch.get("position_ids"),
            CAUSAL if bounds is None else AttentionMask(bounds=bounds),
            batch.get(DROPOUT_SEED),
            Neighbors(batch[NEIGHBOR_TOKENS], batch[NEIGHBOR_LENGTHS]),
        )
        return self.losses(out, batch["labels"]) if self.pipeline_stage.has_output else out

    # --- steps ----------------------------------------------------------------------------

    def _with_neighbors(
        self,
        received: Tensor | None,
        tokens: Tensor | None,
        position_ids: Tensor | None,
        mask: AttentionMask,
        seed: Tensor | None,
        neighbors: Neighbors,
    ) -> Tensor:
        """Output of the layers of this stage: hidden states on the last one, otherwise with
        neighbours behind them, as in `received`."""
        config, hidden, states = self.config, received, None
        parts = self.parallel.tp_size if self.parallel.sequence_parallel else 1
        if received is not None:
            hidden, behind = received.split(
                [config.seq_length // parts, config.neighbor_tokens // parts]
            )
            states = from_behind_sample(behind, config.retrieved_length // parts)
        hidden, inputs, dropout = self.enter(
            self.decoder, hidden, tokens, mask, position_ids=position_ids, seed=seed
        )
        places = self._dropout_of_neighbors(seed, neighbors)
        if states is None:
            states = self._embedded(neighbors, places)
        about = self._about(neighbors, hidden.shape[0] * parts, places)
        after = self.decoder.with_neighbors(WithNeighbors(hidden, states, about), inputs, dropout)
        if self.pipeline_stage.has_output:
            return after.hidden
        return torch.cat((after.hidden, behind_sample(after.neighbors, after.hidden.shape[1])))

    def _embedded(self, neighbors: Neighbors, places: DropoutPlaces | None) -> Tensor:
        """(r, b l k, h)."""
        assert self.embedding is not None
        rows = neighbors.tokens.flatten(0, 2)  # (b l k, r)
        positions = torch.arange(rows.shape[1], device=rows.device).unsqueeze(0)
        return self.dropped_embedding(self.embedding(rows, positions), places)

    def _dropout_of_neighbors(
        self, seed: Tensor | None, neighbors: Neighbors
    ) -> DropoutPlaces | None:
        config, tokens = self.config, neighbors.tokens
        positions = torch.arange(tokens.shape[3], device=tokens.device)
        return self.dropout_places(
            None if seed is None else seed ^ OF_NEIGHBORS,
            positions,
            max(config.hidden_dropout, config.retro_encoder_hidden_dropout),
            config.retro_encoder_layers,
        )

    def _about(
        self, neighbors: Neighbors, seq_length: int, dropout: DropoutPlaces | None
    ) -> NeighborInputs:
        length, lengths = self.config.retro_chunk_length, neighbors.lengths
        size, num_chunks = neighbors.tokens.shape[3], lengths.shape[1]
        assert num_chunks * length <= seq_length, "neighbours of chunks that the text does not have"
        sees_any = has_neighbors(lengths, length, seq_length)
        return NeighborInputs(
            num_chunks,
            LayerInputs(None, own_tokens(lengths, size)),
            retrieved_tokens(lengths, size),
            of_sequence_part(sees_any, self.parallel),
            dropout,
        )
