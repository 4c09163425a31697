"""BERT, or the part of it that a pipeline stage holds: tokens in, logits or losses out.

Parameter names are those of Megatron-LM core's BertModel
(`encoder.layers.0.self_attention.linear_qkv.weight`, `lm_head.dense.weight`), with layers numbered
over the whole model. Tensors are (s, b, h) inside and (b, s) in the interface. Padding is at the
end of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from trainyard.attention.masks import FULL, mask_of_padding
from trainyard.models.bert.config import SOP_LOSS, BertConfig
from trainyard.models.bert.heads import Linear, LMHead, Pooler
from trainyard.models.block import TransformerBlock
from trainyard.models.embedding import Embedding
from trainyard.models.layer_inputs import DROPOUT_SEED
from trainyard.models.losses import Losses
from trainyard.models.model import TransformerModel
from trainyard.models.norm import build_norm
from trainyard.models.output_layer import OutputLayer
from trainyard.models.pipeline_stage import WHOLE, PipelineStage
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.tensor.mappings import gather_from_tp
from trainyard.parallel.tensor.vocab import vocab_parallel_cross_entropy

NO_ORDER = -1
"""Label of a sample whose order of sentences does not count."""


class Predictions(NamedTuple):
    """Output of a whole model."""

    words: Tensor
    """(b, s, true_vocab_size) logits of the word at each place."""
    order: Tensor | None
    """(b, 2) logits: in order, swapped; None without --bert-binary-head."""


class BertEmbedding(Embedding):
    """Words, positions and token types; a norm follows in a post-norm model."""

    def __init__(self, config: BertConfig, vocab_size: int, parallel: ModelParallel) -> None:
        super().__init__(config, vocab_size, parallel, config.token_types)
        self.layernorm = build_norm(config, parallel) if config.post_layernorm else None

    def forward(
        self, tokens: Tensor, positions: Tensor, token_types: Tensor | None = None
    ) -> Tensor:
        """See `Embedding`."""
        x = super().forward(tokens, positions, token_types)
        return x if self.layernorm is None else self.layernorm(x)


class BertModel(TransformerModel):
    """An encoder over a padded vocabulary, with its heads."""

    config: BertConfig

    def __init__(
        self,
        config: BertConfig,
        vocab_size: int,
        parallel: ModelParallel = ALONE,
        pipeline_stage: PipelineStage = WHOLE,
        true_vocab_size: int | None = None,
    ) -> None:
        super().__init__(config, vocab_size, parallel, pipeline_stage, true_vocab_size)
        if pipeline_stage.has_embedding:
            self.embedding = BertEmbedding(config, vocab_size, parallel)
        self.encoder = TransformerBlock(
            config, parallel, pipeline_stage, post_norm=config.post_layernorm
        )
        self.lm_head: LMHead | None = None
        self.output_layer: OutputLayer | None = None
        self.binary_head: Linear | None = None
        self.pooler: Pooler | None = None
        if pipeline_stage.has_output:
            self.lm_head = LMHead(config, parallel)
            self.output_layer = OutputLayer(
                config, vocab_size, parallel, has_weight=self.has_output_weight
            )
            if config.bert_binary_head:
                self.binary_head = Linear(config.hidden_size, 2)
                self.pooler = Pooler(config, parallel)
        self.mark_tied(self.output_layer if self.has_output_weight else None)

    # --- the whole model ------------------------------------------------------------------

    def encode(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (b, s, h) of every token after the last layer and norm, as Retro's
        embedder takes them. On one process.

        tokens: (b, s) int64. padding_mask: (b, s), 1 for tokens and 0 for the padding behind them,
        whose hidden states mean nothing; unset: no padding. token_types: (b, s); unset: all 0."""
        return self._encoded(tokens, padding_mask, token_types).transpose(0, 1)

    def forward(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Predictions:
        """Logits of both heads. Arguments as of `encode`."""
        hidden = self._encoded(tokens, padding_mask, token_types)
        padded = gather_from_tp(self._own_logits(hidden), self.parallel.tp)
        words = padded[..., : self.true_vocab_size].transpose(0, 1)
        return Predictions(words, None if self.binary_head is None else self._order(hidden))

    def _encoded(
        self, tokens: Tensor, padding_mask: Tensor | None, token_types: Tensor | None
    ) -> Tensor:
        mask = FULL if padding_mask is None else mask_of_padding(padding_mask)
        return self.run_layers(self.encoder, None, tokens, mask, token_types=token_types)

    # --- a part of it ---------------------------------------------------------------------

    def forward_step(self, hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor | Losses:
        """Output of this stage for a micro-batch: (s, b, h) for the next stage, or its losses on
        the last.

        hidden: output of the previous stage; None on the first. batch: text, types, padding_mask
        and labels, (b, s); is_random (b), whether the sentences are swapped; `dropout_seed` for
        training with dropout."""
        out = self.run_layers(
            self.encoder,
            hidden,
            batch["text"] if self.pipeline_stage.has_embedding else None,
            mask_of_padding(batch["padding_mask"]),
            token_types=batch["types"],
            seed=batch.get(DROPOUT_SEED),
        )
        if not self.pipeline_stage.has_output:
            return out
        order = {} if self.binary_head is None else {SOP_LOSS: self._sop(out, batch["is_random"])}
        return Losses(self.losses(out, batch["labels"]), order)

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of each label in nats, (b, s) fp32. hidden: (s, b, h) after the last layer;
        labels: (b, s), below 0 where no word is hidden, whose loss means nothing."""
        losses = vocab_parallel_cross_entropy(
            self._own_logits(hidden), labels.t().clamp(min=0), self.parallel, self.true_vocab_size
        )
        return losses.t()

    def _own_logits(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary."""
        assert self.lm_head is not None
        assert self.output_layer is not None
        tied = None if self.embedding is None else self.embedding.word_embeddings.weight
        logits: Tensor = self.output_layer(self.lm_head(hidden), tied)
        return logits

    def _order(self, hidden: Tensor) -> Tensor:
        assert self.pooler is not None
        assert self.binary_head is not None
        logits: Tensor = self.binary_head(self.pooler(hidden))
        return logits

    def _sop(self, hidden: Tensor, is_random: Tensor) -> Tensor:
        """Mean cross entropy of the order of sentences, () fp32."""
        order = self._order(hidden).float()
        return functional.cross_entropy(order, is_random, ignore_index=NO_ORDER)
