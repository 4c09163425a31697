"""A decoder at work on batches that are smaller than its own, where another one would cost too
much: see `graphs`. b batch, s tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainyard.inference.decoders import PADDING, Decoder, Start


class PaddedDecoder:
    """Rows after those of the batch hold padding; their logits are dropped."""

    def __init__(self, decoder: Decoder, batch_size: int) -> None:
        """batch_size: of the decoder, and the most rows of a batch."""
        self._decoder, self._batch_size, self._num_rows = decoder, batch_size, batch_size
        self.cache_bytes = decoder.cache_bytes

    def start(self, prompts: Sequence[Sequence[int]], top_n: int | None = None) -> Start:
        """See `Decoder`. Scores are (s - 1, b) of the decoder's batch, the padding behind."""
        self._num_rows = len(prompts)
        padding = [[PADDING]] * (self._batch_size - len(prompts))
        found = self._decoder.start([*prompts, *padding], top_n)
        return Start(found.logits[: self._num_rows], found.scores)

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder`."""
        padding = self._batch_size - self._num_rows
        padded = torch.nn.functional.pad(tokens, (0, padding), value=PADDING)
        return self._decoder.step(padded)[: self._num_rows]

    def reorder(self, rows: Sequence[int]) -> None:
        """See `Decoder`."""
        self._decoder.reorder([*rows, *range(self._num_rows, self._batch_size)])
