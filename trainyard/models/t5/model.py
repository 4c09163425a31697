"""T5, or the part of it that a pipeline stage holds: tokens of encoder and decoder in, logits or
per-token losses of the decoder out.

Parameter names are those of Megatron-LM core's T5Model
(`decoder.layers.0.cross_attention.linear_q.weight`), the layers of encoder and decoder numbered
each for itself, over the whole model. Pipeline stages have the layers of the encoder, then those of
the decoder. Both are embedded on the first stage, and stages pass the hidden states of both, those
of the decoder behind those of the encoder.

Tensors are (s, b, h) inside and (b, s) in the interface; s_e and s_d are the lengths of encoder and
decoder. Padding is at the end of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.attention.masks import (
    CAUSAL,
    FULL,
    AttentionMask,
    as_mask,
    cross_mask,
    mask_of_padding,
)
from trainyard.models.attention import KVCache
from trainyard.models.block import DecoderLayer, TransformerBlock
from trainyard.models.embedding import Embedding
from trainyard.models.layer_inputs import DROPOUT_SEED, DropoutPlaces, LayerInputs
from trainyard.models.model import TransformerModel
from trainyard.models.output_layer import OutputLayer
from trainyard.models.pipeline_stage import WHOLE, PipelineStage
from trainyard.models.t5.config import T5Config
from trainyard.models.t5.positions import RelativePositions
from trainyard.parallel.invariant_dropout import of_sequence_part
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.tensor.mappings import gather_from_tp
from trainyard.parallel.tensor.vocab import vocab_parallel_cross_entropy


class Streams(NamedTuple):
    """Hidden states of encoder and decoder, this rank's parts under sequence parallelism."""

    encoder: Tensor
    """(s_e, b, h)"""
    decoder: Tensor
    """(s_d, b, h)"""


class T5Model(TransformerModel):
    """An encoder and a decoder over one padded vocabulary."""

    config: T5Config

    def __init__(
        self,
        config: T5Config,
        vocab_size: int,
        parallel: ModelParallel = ALONE,
        pipeline_stage: PipelineStage = WHOLE,
        true_vocab_size: int | None = None,
    ) -> None:
        super().__init__(config, vocab_size, parallel, pipeline_stage, true_vocab_size)
        if pipeline_stage.has_embedding:
            self.embedding = Embedding(config, vocab_size, parallel)
        of_encoder, of_decoder = stages_of(config, pipeline_stage)
        self.encoder = TransformerBlock(config, parallel, of_encoder)
        self.decoder = TransformerBlock(
            config, parallel, of_decoder, num_layers=config.decoder_layers, layer=DecoderLayer
        )
        self.encoder_relative_pos_emb: RelativePositions | None = None
        self.decoder_relative_pos_emb: RelativePositions | None = None
        if config.position_embedding_type == "relative":
            assert pipeline_stage.has_embedding, "stages do not share a table of distances"
            self.encoder_relative_pos_emb = RelativePositions(config, parallel, both_ways=True)
            self.decoder_relative_pos_emb = RelativePositions(config, parallel, both_ways=False)
        self.output_layer: OutputLayer | None = None
        if pipeline_stage.has_output:
            self.output_layer = OutputLayer(
                config,
                vocab_size,
                parallel,
                has_weight=self.has_output_weight,
                has_bias=config.has_output_bias,
            )
        self.mark_tied(self.output_layer if self.has_output_weight else None)

    # --- the whole model ------------------------------------------------------------------

    def forward(
        self, tokens: Tensor, decoder_tokens: Tensor, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Logits (b, s_d, true_vocab_size) of the token after each of `decoder_tokens`.

        tokens: (b, s_e) int64, decoder_tokens: (b, s_d). padding_mask: (b, s_e), 1 for tokens and 0
        for the padding behind them; unset: no padding."""
        streams = self._run(None, tokens, decoder_tokens, padding_mask, None)
        return self.logits(streams.decoder).transpose(0, 1)

    # --- a part of it ---------------------------------------------------------------------

    def forward_step(self, hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
        """Output of this stage for a micro-batch: (s_e + s_d, b, h) for the next stage, or the loss
        of each token of the decoder on the last, (b, s_d).

        hidden: output of the previous stage; None on the first. batch: text_enc and enc_mask,
        (b, s_e), text_dec and labels, (b, s_d); `dropout_seed` for training with dropout."""
        streams = self._run(
            hidden,
            batch["text_enc"],
            batch["text_dec"],
            batch["enc_mask"],
            batch.get(DROPOUT_SEED),
        )
        if not self.pipeline_stage.has_output:
            return torch.cat(streams)
        return self.losses(streams.decoder, batch["labels"])

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of each label in nats, (b, s_d) fp32. hidden: (s_d, b, h) after the last
        layer; labels: (b, s_d), below 0 for padding, whose loss means nothing."""
        losses = vocab_parallel_cross_entropy(
            self._own_logits(hidden), labels.t().clamp(min=0), self.parallel, self.true_vocab_size
        )
        return losses.t()

    def _run(
        self,
        hidden: Tensor | None,
        tokens: Tensor,
        decoder_tokens: Tensor,
        padding_mask: Tensor | None,
        seed: Tensor | None,
    ) -> Streams:
        """The hidden states after the layers of this stage, normalised where the encoder or the
        decoder ends."""
        (s_e, s_d), device = (tokens.shape[1], decoder_tokens.shape[1]), tokens.device
        places = [torch.arange(s, device=device) for s in (s_e, s_d)]
        dropout = self._places_of_dropout(seed, places)
        if self.embedding is None:
            assert hidden is not None, "a stage without the embedding needs the hidden states"
            x, y = self._split(hidden, s_e, s_d)
        else:
            x, y = (
                self.dropped_embedding(self.embedding(ids, positions.unsqueeze(0)), own)
                for ids, positions, own in zip(
                    (tokens, decoder_tokens), places, dropout, strict=True
                )
            )
        x = self._encoded(x, s_e, padding_mask, dropout[0])
        inputs = self._decoder_inputs(x, places[1].unsqueeze(0), padding_mask)
        return Streams(x, self.decoder(y, inputs, dropout[1]))

    def _encoded(
        self,
        x: Tensor,
        length: int,
        padding_mask: Tensor | None,
        dropout: DropoutPlaces | None = None,
    ) -> Tensor:
        """x after the layers of the encoder. length: of the whole sequence."""
        positions = torch.arange(length, device=x.device).unsqueeze(0)
        mask = FULL if padding_mask is None else mask_of_padding(padding_mask)
        bias = _bias(self.encoder_relative_pos_emb, length)
        inputs = LayerInputs(self.rotary(self.encoder, positions), mask, bias=bias)
        out: Tensor = self.encoder(x, inputs, dropout)
        return out

    def _decoder_inputs(
        self, source: Tensor, positions: Tensor, padding_mask: Tensor | None
    ) -> LayerInputs:
        """Of a pass over a whole sequence. positions: (1, s_d)."""
        length = positions.shape[1]
        return LayerInputs(
            self.rotary(self.decoder, positions),
            CAUSAL,  # no token of the decoder sees the padding behind it
            bias=_bias(self.decoder_relative_pos_emb, length),
            source=source.to(self.dtype),
            source_mask=_source_mask(padding_mask, length),
        )

    # --- generation -----------------------------------------------------------------------

    def encode(
        self, tokens: Tensor, padding_mask: Tensor, received: Tensor | None = None
    ) -> Tensor:
        """Hidden states (s_e, b, h) after the layers of the encoder on this stage. tokens:
        (b, s_e); received: those of the previous stage, None on the first."""
        x, length = received, tokens.shape[1]
        if x is None:
            x = self._embedded(tokens, torch.arange(length, device=tokens.device).unsqueeze(0))
        return self._encoded(x, length, padding_mask)

    def decode(
        self,
        tokens: Tensor,
        source: Tensor,
        padding_mask: Tensor,
        kv_cache: KVCache,
        source_cache: dict[int, tuple[Tensor, Tensor]],
        received: Tensor | None = None,
    ) -> Tensor:
        """Inputs of the output layer for the next tokens of the decoder, (s, b, h), or of the next
        stage.

        tokens: (b, s), the same number of tokens before them in each row. source: what the last
        stage of the encoder gave. source_cache: empty on the first call. received: (s, b, h) from
        the previous stage, None on the first."""
        num_new, positions = tokens.shape[1], kv_cache.positions(tokens.shape[1])
        y = self._embedded(tokens, positions) if received is None else received
        table, bias = self.decoder_relative_pos_emb, None
        if table is not None:
            bias = table(int(positions[0, -1]) + 1, num_new)
        inputs = LayerInputs(
            self.rotary(self.decoder, positions),
            as_mask(kv_cache.mask(num_new)),
            kv_cache,
            bias,
            source=source.to(self.dtype),
            source_mask=_source_mask(padding_mask, num_new),
            source_cache=source_cache,
        )
        out: Tensor = self.decoder(y, inputs)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (..., h). Returns (..., true_vocab_size), whole on every rank."""
        padded = gather_from_tp(self._own_logits(hidden), self.parallel.tp)
        return padded[..., : self.true_vocab_size]

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        assert self.embedding is not None
        return self.dropped_embedding(self.embedding(tokens, positions), None)

    def _split(self, hidden: Tensor, s_e: int, s_d: int) -> Streams:
        size = self.parallel.tp_size if self.parallel.sequence_parallel else 1
        return Streams(*hidden.split([s_e // size, s_d // size]))

    def _places_of_dropout(
        self, seed: Tensor | None, places: list[Tensor]
    ) -> list[DropoutPlaces | None]:
        """Of encoder and decoder, which have no seed of a layer in common."""
        if not self.training or not self.config.hidden_dropout:
            return [None, None]
        seed = self._seed(seed, places[0].device)
        own = [of_sequence_part(positions, self.parallel) for positions in places]
        layers = self.config.num_layers
        return [
            DropoutPlaces(seed, own[0], layers),
            DropoutPlaces(seed, own[1], self.config.decoder_layers, first=layers + 1),
        ]

    def _own_logits(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary."""
        assert self.output_layer is not None
        if self.config.scale_lm_head_input:
            hidden = hidden * self.config.hidden_size**-0.5
        tied = None if self.embedding is None else self.embedding.word_embeddings.weight
        logits: Tensor = self.output_layer(hidden, tied)
        return logits


def stages_of(config: T5Config, stage: PipelineStage) -> tuple[PipelineStage, PipelineStage]:
    """The parts of a stage in the encoder and in the decoder. The output of each, its final norm,
    is on the stage of its last layer, or of the output layer."""
    first, numbers = config.num_layers, stage.layer_numbers(config.all_layers)
    of_encoder = range(min(numbers.start, first), min(numbers.stop, first))
    of_decoder = range(max(numbers.start - first, 0), max(numbers.stop - first, 0))
    return (
        PipelineStage(of_encoder, has_output=bool(of_encoder) and of_encoder.stop == first),
        PipelineStage(of_decoder, has_output=stage.has_output),
    )


def _bias(positions: RelativePositions | None, length: int) -> Tensor | None:
    return None if positions is None else positions(length)


def _source_mask(padding_mask: Tensor | None, s_d: int) -> AttentionMask:
    if padding_mask is None:
        return FULL
    return cross_mask(padding_mask.sum(dim=1), s_d, padding_mask.shape[1])
