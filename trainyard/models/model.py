"""What the models of all families share: from tokens or hidden states to hidden states, on the part
that a pipeline stage holds.

Tensors are (s, b, h) inside. s is this rank's part of the sequence under context parallelism."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainyard.attention.masks import AttentionMask
from trainyard.models.attention import KVCache
from trainyard.models.block import TransformerBlock
from trainyard.models.config import TransformerConfig
from trainyard.models.embedding import Embedding
from trainyard.models.layer_inputs import DROPOUT_SEED, DropoutPlaces, LayerInputs
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.models.rope import Rotary, build_rotary
from trainyard.models.tied import mark_copy, mark_shared
from trainyard.parallel.context.split import local_positions
from trainyard.parallel.invariant_dropout import cut_free_dropout, of_sequence_part
from trainyard.parallel.model import ModelParallel


class Entry(NamedTuple):
    """Arguments of a `TransformerBlock`."""

    hidden: Tensor
    """(s, b, h)."""
    inputs: LayerInputs
    dropout: DropoutPlaces | None


class TransformerModel(nn.Module):
    """An embedding, a block of layers and an output layer, which subclasses add.

    vocab_size: rows of the embedding, padding included. true_vocab_size: tokens; the rows after
    them are never scored and never trained. Unset: every row is a token.

    Parameters are unfilled until `init_parameters` or a checkpoint fills them."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        parallel: ModelParallel,
        pipeline_stage: PipelineStage,
        true_vocab_size: int | None,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.true_vocab_size = vocab_size if true_vocab_size is None else true_vocab_size
        assert self.true_vocab_size <= vocab_size, (true_vocab_size, vocab_size)
        self.parallel, self.pipeline_stage = parallel, pipeline_stage
        self.embedding: Embedding | None = None

    @property
    def has_output_weight(self) -> bool:
        """Whether the output layer has a weight, of its own or a copy of the embedding's."""
        stage, tied = self.pipeline_stage, not self.config.untie_embeddings_and_output_weights
        return stage.has_output and not (tied and stage.has_embedding)

    def mark_tied(self, output: nn.Module | None) -> None:
        """Mark embedding or output weight if another stage holds the same numbers."""
        stage = self.pipeline_stage
        tied = not self.config.untie_embeddings_and_output_weights
        if not tied or stage.has_embedding == stage.has_output:
            return
        if output is not None:
            assert isinstance(output.weight, nn.Parameter)
            mark_copy(output.weight)
        elif self.embedding is not None:
            mark_shared(self.embedding.word_embeddings.weight)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.parameters()).device

    def run_layers(
        self,
        block: TransformerBlock,
        hidden: Tensor | None,
        tokens: Tensor | None,
        mask: AttentionMask,
        *,
        position_ids: Tensor | None = None,
        token_types: Tensor | None = None,
        kv_cache: KVCache | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (s, b, h) after the layers of this stage, normalised on the last one.

        tokens: (b, s) on the stage with the embedding; hidden: (s, b, h) on every other. seed: of
        dropout; alone it may be unset, and is then drawn."""
        entry = self.enter(
            block,
            hidden,
            tokens,
            mask,
            position_ids=position_ids,
            token_types=token_types,
            kv_cache=kv_cache,
            seed=seed,
        )
        out: Tensor = block(*entry)
        return out

    def enter(
        self,
        block: TransformerBlock,
        hidden: Tensor | None,
        tokens: Tensor | None,
        mask: AttentionMask,
        *,
        position_ids: Tensor | None = None,
        token_types: Tensor | None = None,
        kv_cache: KVCache | None = None,
        seed: Tensor | None = None,
    ) -> Entry:
        """The arguments of the layers of this stage; those here are as of `run_layers`."""
        source = tokens if tokens is not None else hidden
        assert source is not None, "a stage without the embedding needs the hidden states"
        places = self._places(source, is_hidden=tokens is None)
        if position_ids is None:
            position_ids = places.unsqueeze(0)
        config = self.config
        dropout = self.dropout_places(seed, places, config.hidden_dropout, config.num_layers)
        if self.embedding is not None:
            assert tokens is not None
            embedded = self.embedding(tokens, position_ids, token_types)
            hidden = self.dropped_embedding(embedded, dropout)
        assert hidden is not None
        return Entry(hidden, LayerInputs(self.rotary(block, position_ids), mask, kv_cache), dropout)

    def _places(self, source: Tensor, *, is_hidden: bool) -> Tensor:
        """(s) positions in the whole sequence of this rank's tokens."""
        parallel = self.parallel
        s = source.shape[0] if is_hidden else source.shape[1]
        if is_hidden and parallel.sequence_parallel:
            s *= parallel.tp_size
        if parallel.cp is None:
            return torch.arange(s, device=source.device)
        return local_positions(
            s * parallel.cp_size, parallel.cp_size, parallel.cp_rank, source.device
        )

    def dropped_embedding(self, embedded: Tensor, dropout: DropoutPlaces | None) -> Tensor:
        """The residual stream before the first layer."""
        x = embedded.float() if self.config.fp32_residual_connection else embedded
        if dropout is None:
            return x
        return cut_free_dropout(x, self.config.hidden_dropout, dropout.of_embedding(), 0)

    def dropout_places(
        self, seed: Tensor | None, places: Tensor, p: float, num_layers: int, first: int = 0
    ) -> DropoutPlaces | None:
        """Of layers with dropout of probability p over tokens at these (s) places; None without.
        first: as of `DropoutPlaces`."""
        if not self.training or not p:
            return None
        local = of_sequence_part(places, self.parallel)
        return DropoutPlaces(self._seed(seed, places.device), local, num_layers, first)

    def _seed(self, seed: Tensor | None, device: torch.device) -> Tensor:
        """() of dropout: the given one, or alone a drawn one."""
        if seed is not None:
            return seed
        alone = self.parallel.tp is None and self.parallel.cp is None
        assert alone, f"ranks that share a sequence need one {DROPOUT_SEED}"
        return torch.randint(2**62, (), device=device)

    def rotary(self, block: TransformerBlock, position_ids: Tensor) -> Rotary | None:
        """At (b, s) positions; None for layers that rotate nothing."""
        if not self.config.rotary or not block.layers:
            return None
        return build_rotary(self.config, position_ids, self.dtype)
