"""GPT, or the part of it that a pipeline stage holds: tokens in, logits or per-token losses out.

Parameter names are Megatron-LM core's (`decoder.layers.0.self_attention.linear_qkv.weight`), with
layers numbered over the whole model. Tensors are (s, b, h) inside and (b, s) in the interface. s is
this rank's part of the sequence under context parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from trainyard.attention.masks import CAUSAL, AttentionMask, as_mask
from trainyard.models.attention import KVCache
from trainyard.models.block import TransformerBlock
from trainyard.models.embedding import Embedding
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.layer_inputs import DROPOUT_SEED
from trainyard.models.losses import Losses
from trainyard.models.model import Entry, TransformerModel
from trainyard.models.mtp import MultiTokenPrediction, shifted
from trainyard.models.pipeline_stage import WHOLE, PipelineStage
from trainyard.models.tied import mark_copy, mark_shared
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.tensor.linear import ColumnParallelLinear
from trainyard.parallel.tensor.mappings import gather_from_tp
from trainyard.parallel.tensor.overlap import column_linear
from trainyard.parallel.tensor.vocab import vocab_parallel_cross_entropy


class GPTModel(TransformerModel):
    """A decoder-only transformer over a padded vocabulary."""

    block_class: ClassVar[type[TransformerBlock]] = TransformerBlock

    def __init__(
        self,
        config: GPTConfig,
        vocab_size: int,
        parallel: ModelParallel = ALONE,
        pipeline_stage: PipelineStage = WHOLE,
        true_vocab_size: int | None = None,
    ) -> None:
        super().__init__(config, vocab_size, parallel, pipeline_stage, true_vocab_size)
        if pipeline_stage.has_embedding:
            self.embedding = Embedding(config, vocab_size, parallel)
        self.decoder = self.block_class(config, parallel, pipeline_stage)
        self.output_layer: ColumnParallelLinear | None = None
        if self.has_output_weight:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size, vocab_size, bias=False, parallel=parallel
            )
        self.mark_tied(self.output_layer)
        self.mtp: MultiTokenPrediction | None = None
        if config.mtp.mtp_num_layers is not None:
            self._add_prediction(vocab_size)

    def _add_prediction(self, vocab_size: int) -> None:
        """Multi-token prediction on the last stage, which embeds tokens too: by the same table, by
        that of the tied output layer, or by a copy of its own."""
        stage, untied = self.pipeline_stage, self.config.untie_embeddings_and_output_weights
        is_apart = untied and stage.has_embedding != stage.has_output
        if stage.has_output:
            self.mtp = MultiTokenPrediction(
                self.config, vocab_size, self.parallel, has_embedding=is_apart
            )
            if self.mtp.word_embeddings is not None:
                mark_copy(self.mtp.word_embeddings.weight)
        elif self.embedding is not None and is_apart:
            mark_shared(self.embedding.word_embeddings.weight)

    # --- the whole model ------------------------------------------------------------------

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        kv_cache: KVCache | None = None,
        attention_mask: AttentionMask | Tensor | None = None,
    ) -> Tensor:
        """Logits (b, s, true_vocab_size) of the token after each of `tokens`, (b, s) int64."""
        hidden = self.hidden_states(tokens, position_ids, kv_cache, attention_mask)
        return self.logits(hidden).transpose(0, 1)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: AttentionMask | Tensor | None = None,
        dropout_seed: Tensor | None = None,
    ) -> Tensor:
        """Cross entropy of each label in nats, (b, s) fp32, not masked and not averaged."""
        hidden = self._run(None, tokens, position_ids, as_mask(attention_mask), None, dropout_seed)
        return self.losses(hidden, labels)

    def hidden_states(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        kv_cache: KVCache | None = None,
        attention_mask: AttentionMask | Tensor | None = None,
        received: Tensor | None = None,
    ) -> Tensor:
        """Inputs of the output layer, (s, b, h), after the final norm; on a pipeline stage without
        it, those of the next stage.

        position_ids: (b, s); unset: 0, 1, ... after the tokens in the cache. attention_mask: a
        mask, or (b, 1, s, s) True where a token may look; unset: causal. A cache has its own mask.
        The caller advances it, since only the caller knows how many of the tokens count. received:
        (s, b, h) from the previous stage; None on the first."""
        num_new = tokens.shape[1]
        if kv_cache is not None:
            attention_mask = kv_cache.mask(num_new)
            position_ids = kv_cache.positions(num_new) if position_ids is None else position_ids
        mask, own = as_mask(attention_mask), tokens if received is None else None
        return self._run(received, own, position_ids, mask, kv_cache, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (..., h). Returns (..., true_vocab_size), whole on every rank: a view without
        the padding, which can neither be sampled nor scored."""
        padded = gather_from_tp(self._own_logits(hidden), self.parallel.tp)
        return padded[..., : self.true_vocab_size]

    # --- a part of it ---------------------------------------------------------------------

    def forward_step(self, hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor | Losses:
        """Output of this stage for a micro-batch: (s, b, h) for the next stage, or per-token losses
        (b, s) fp32 on the last, with multi-token prediction those of further tokens as well.

        hidden: output of the previous stage; None on the first. batch: tokens and labels, (b, s);
        position_ids (b, s) if they differ from the places in the sequence; cu_seqlens (b, w) if
        attention stops at documents; `dropout_seed` for training with dropout."""
        bounds = batch.get("cu_seqlens")
        mask = CAUSAL if bounds is None else AttentionMask(bounds=bounds)
        entry = self.enter(
            self.decoder,
            hidden,
            batch["tokens"] if self.pipeline_stage.has_embedding else None,
            mask,
            position_ids=batch.get("position_ids"),
            seed=batch.get(DROPOUT_SEED),
        )
        out: Tensor = self.decoder(*entry)
        if not self.pipeline_stage.has_output:
            return out
        losses = self.losses(out, batch["labels"])
        return losses if self.mtp is None else self._further(self.mtp, out, losses, entry, batch)

    def _further(
        self,
        mtp: MultiTokenPrediction,
        hidden: Tensor,
        losses: Tensor,
        entry: Entry,
        batch: Mapping[str, Tensor],
    ) -> Losses:
        """The losses of the next tokens, and those of multi-token prediction by depth."""
        config, names = self.config, self.config.mtp.loss_names
        places = self.dropout_places(
            batch.get(DROPOUT_SEED),
            self._places(hidden, is_hidden=True),
            config.hidden_dropout,
            2 * mtp.depths,
            first=config.num_layers + 1,
        )
        later = list(shifted(batch, mtp.depths, self.parallel.cp))
        tokens = [depth.tokens for depth in later]
        found = mtp.hidden_states(hidden, tokens, self._table(mtp), entry.inputs, places)
        means, num_tokens = {}, {}
        for name, out, depth in zip(names, found, later, strict=True):
            total = (self.losses(out, depth.labels) * depth.loss_mask).sum()
            means[name] = total / depth.num_tokens.clamp(min=1.0)
            num_tokens[name] = depth.num_tokens
        factor = config.mtp.mtp_loss_scaling_factor / mtp.depths
        return Losses(losses, means, dict.fromkeys(names, factor), num_tokens)

    def _table(self, mtp: MultiTokenPrediction) -> Tensor:
        """Rows of the embedding on the last stage."""
        for table in (mtp.word_embeddings, self.embedding, self.output_layer):
            if table is not None:
                owner = table.word_embeddings if isinstance(table, Embedding) else table
                return owner.weight
        raise AssertionError("the last stage has a table of the vocabulary")

    # --- steps ----------------------------------------------------------------------------

    def _run(
        self,
        hidden: Tensor | None,
        tokens: Tensor | None,
        position_ids: Tensor | None,
        mask: AttentionMask,
        kv_cache: KVCache | None,
        seed: Tensor | None,
    ) -> Tensor:
        return self.run_layers(
            self.decoder,
            hidden,
            tokens,
            mask,
            position_ids=position_ids,
            kv_cache=kv_cache,
            seed=seed,
        )

    def _own_logits(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary."""
        if self.output_layer is not None:
            out: Tensor = self.output_layer(hidden)
            return out
        assert self.embedding is not None
        return column_linear(hidden, self.embedding.word_embeddings.weight, None, self.parallel)

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of each label in nats, (b, s) fp32. hidden: (s, b, h) after the final norm;
        labels: (b, s)."""
        logits = self._own_logits(hidden)
        losses = vocab_parallel_cross_entropy(
            logits, labels.t(), self.parallel, self.true_vocab_size
        )
        return losses.t()
