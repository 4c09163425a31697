"""A BERT that chooses a class for a text, or one of several texts: encoder, pooler, dropout, and a
linear layer in place of the heads of its training (Megatron-LM's Classification and
MultipleChoice).

b samples of a micro-batch, c texts of a sample (1, or one for each choice), s sequence,
h hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.attention.masks import mask_of_padding
from trainyard.models.bert.config import BertConfig
from trainyard.models.bert.heads import Linear, Pooler
from trainyard.models.bert.model import BertModel
from trainyard.models.layer_inputs import DROPOUT_SEED, DropoutPlaces
from trainyard.models.pipeline_stage import WHOLE, PipelineStage
from trainyard.parallel.invariant_dropout import cut_free_dropout
from trainyard.parallel.model import ALONE, ModelParallel

HEAD = "classification_head"
OF_POOLED = 0x2545F491
"""Sets the seed of the dropout before the head apart from those of the layers."""


class BertClassifier(BertModel):
    """The encoder with its new head, or the part on a pipeline stage."""

    def __init__(
        self,
        config: BertConfig,
        vocab_size: int,
        num_outputs: int,
        parallel: ModelParallel = ALONE,
        pipeline_stage: PipelineStage = WHOLE,
        true_vocab_size: int | None = None,
    ) -> None:
        """num_outputs: classes of a text; 1 where each text is one of the choices of a sample."""
        # Untied: nothing shares the embedding once the head of words is gone.
        alone = replace(config, untie_embeddings_and_output_weights=True)
        super().__init__(alone, vocab_size, parallel, pipeline_stage, true_vocab_size)
        self.lm_head = self.output_layer = self.binary_head = None
        self.classification_head: Linear | None = None
        if pipeline_stage.has_output:
            self.pooler = self.pooler or Pooler(config, parallel)
            self.classification_head = Linear(config.hidden_size, num_outputs)

    def classify_step(self, hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
        """Output of this stage: (s, b * c, h) for the next one, or on the last the logits of each
        sample, (b, classes) fp32.

        hidden: output of the previous stage; None on the first. batch: text, types and
        padding_mask, (b, c, s); `dropout_seed` for training with dropout."""
        text, types, kept = (
            batch[key].flatten(0, 1) for key in ("text", "types", "padding_mask")
        )  # (b * c, s)
        seed = batch.get(DROPOUT_SEED)
        out = self.run_layers(
            self.encoder,
            hidden,
            text if self.pipeline_stage.has_embedding else None,
            mask_of_padding(kept),
            token_types=types if self.config.token_types else None,
            seed=seed,
        )
        if not self.pipeline_stage.has_output:
            return out
        assert self.pooler is not None
        assert self.classification_head is not None
        pooled = self._dropped(self.pooler(out), seed)
        logits: Tensor = self.classification_head(pooled).float()
        return logits.view(batch["text"].shape[0], -1)

    def forward_step(self, hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
        """As `classify_step`, but on the last stage the cross entropy of each sample, (b, 1) fp32.
        batch: with `label`, (b)."""
        out = self.classify_step(hidden, batch)
        if not self.pipeline_stage.has_output:
            return out
        return functional.cross_entropy(out, batch["label"], reduction="none").unsqueeze(1)

    def _dropped(self, pooled: Tensor, seed: Tensor | None) -> Tensor:
        """(b * c, h), alike on all tensor-parallel ranks."""
        if not self.training or not self.config.hidden_dropout or seed is None:
            return pooled
        first = torch.zeros(1, dtype=torch.int64, device=pooled.device)
        place = DropoutPlaces(seed ^ OF_POOLED, first, 0).of_embedding()
        return cut_free_dropout(pooled.unsqueeze(0), self.config.hidden_dropout, place, 0)[0]
