"""A model at work on the steps of the dynamic engine, on each of the ranks that hold it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.attention.paged_cache import PagedKVCache
from trainyard.inference.decoders import Stepping
from trainyard.inference.dynamic.batch import StepBatch, layout_of, on_device, state_groups
from trainyard.inference.dynamic.graphs import DecodeGraphs
from trainyard.inference.log_probs import Scores, no_scores, score_places
from trainyard.models.gpt.model import GPTModel
from trainyard.parallel.groups import ALONE, ProcessGroups


class StepOutput(NamedTuple):
    """What a step gives, on every rank."""

    logits: Tensor
    """(L, V) after each of the wanted rows."""
    scores: Scores | None
    """(P, 1) of the scored tokens."""


class PagedRunner(Stepping):
    """A GPT, a Mamba or a hybrid, or a part of it, with a cache in blocks and slots."""

    def __init__(
        self,
        model: GPTModel,
        cache: PagedKVCache,
        groups: ProcessGroups = ALONE,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(model, groups, vocab_size)
        self._gpt, self.cache = model, cache
        self.graphs: DecodeGraphs | None = None
        """Of steps of one token of each request, if there are any."""

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepOutput:
        """Compute a step; all ranks call this with the same one."""
        device, states = self.model.device, self.cache.states
        if not states.is_empty and len(begun := batch.slots[batch.firsts == 0]):
            states.clear(on_device([begun], device)[0])
        size = self.cache.block_size
        if self.cache.flash_version > 2 and len(begun := batch.begun_blocks(size)):
            self.cache.clear(on_device([begun], device)[0])
        if self.graphs is not None and self.graphs.takes(batch):
            return StepOutput(self.graphs(batch), None)
        tokens, self.cache.layout = layout_of(batch, size, device)
        if not states.is_empty:
            states.groups = state_groups(batch, device)

        def layers(received: Tensor | None) -> Tensor:
            return self._gpt.hidden_states(tokens, kv_cache=self.cache, received=received)

        hidden = self.through(tokens.shape[1], 1, layers)[:, 0]  # (T, h)
        rows, places, targets = on_device(
            (batch.logit_rows, batch.score_rows, batch.score_targets), device
        )
        scores = self._scores(hidden[places], targets, batch.top_n) if len(places) else None
        return StepOutput(self.logits(hidden[rows]), scores)

    def _scores(self, hidden: Tensor, targets: Tensor, top_n: int) -> Scores:
        """(P, 1) of tokens (P) by the hidden states before them, (P, h), on every stage."""
        count, top_n = len(targets), min(top_n, self.vocab_size)
        own = no_scores(count, 1, top_n, targets.device)
        if self.chain.is_last:
            own = score_places(
                hidden.unsqueeze(1), targets.unsqueeze(1), self._own_logits, top_n, self.vocab_size
            )
        shared = (self.chain.from_last(x, tuple(x.shape), x.dtype, x.device) for x in own)
        return Scores(*shared)
