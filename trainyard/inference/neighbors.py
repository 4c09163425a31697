"""Generates from a Retro whose prompt comes with neighbours of its chunks.

Every new token passes the whole text again: encoder and chunks need it, and no cache of keys and
values knows them. The neighbours of a chunk serve its last token and the next chunk, so those of
the last chunk of a prompt serve the answer (arXiv:2112.04426, section 2.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainyard.inference.config import GREEDY, SamplingConfig, check_length
from trainyard.inference.decoders import Start
from trainyard.inference.log_probs import score
from trainyard.inference.request import Request
from trainyard.inference.static import run_requests
from trainyard.models.retro.chunks import Neighbors
from trainyard.models.retro.model import RetroModel

PADDING = 0


def neighbors_of_texts(
    model: RetroModel, chunks: Sequence[Sequence[Sequence[int]]], length: int
) -> Neighbors:
    """The tokens of given neighbours of the first chunks of one text, as the model takes them.

    chunks: for each chunk its neighbours, at most --retro-num-neighbors; longer ones are cut to
    the tokens of a neighbour. length: tokens of the text. ConfigError for neighbours of chunks that
    it does not have."""
    model.config.neighbor_shape().check_counts(chunks, length)
    count, size = model.config.retro_num_neighbors, model.config.retrieved_length
    tokens = torch.full((1, len(chunks), count, size), PADDING, dtype=torch.int64)
    lengths = torch.zeros((1, len(chunks), count), dtype=torch.int64)
    for chunk, texts in enumerate(chunks):
        for place, text in enumerate(texts):
            kept = torch.tensor(text[:size], dtype=torch.int64)
            tokens[0, chunk, place, : len(kept)] = kept
            lengths[0, chunk, place] = len(kept)
    return Neighbors(tokens.to(model.device), lengths.to(model.device))


class NeighborDecoder:
    """A Retro with a text of one row and its neighbours. Implements `decoders.Decoder`."""

    cache_bytes = 0

    def __init__(
        self,
        model: RetroModel,
        chunks: Sequence[Sequence[Sequence[int]]],
        vocab_size: int | None = None,
    ) -> None:
        """chunks: the tokens of the neighbours of each of the first whole chunks of the prompt;
        empty lists for a chunk without any."""
        self._model, self._chunks, self._vocab_size = model, chunks, vocab_size

    def start(self, prompts: Sequence[Sequence[int]], top_n: int | None = None) -> Start:
        """See `Decoder`."""
        (prompt,) = prompts
        device = self._model.device
        self._neighbors = neighbors_of_texts(self._model, self._chunks, len(prompt))
        self._text = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
        logits = self._logits()
        if top_n is None:
            return Start(logits[-1])
        return Start(logits[-1], score(logits[:-1], self._text[:, 1:].t(), top_n))

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder`."""
        self._text = torch.cat((self._text, tokens.unsqueeze(1)), dim=1)
        return self._logits()[-1]

    def reorder(self, rows: Sequence[int]) -> None:
        """See `Decoder`."""
        self._text = self._text[list(rows)]

    def _logits(self) -> Tensor:
        """(s, 1, V) after every token."""
        logits: Tensor = self._model(self._text, neighbors=self._neighbors)
        return logits[..., : self._vocab_size].transpose(0, 1)


def generate_with_neighbors(
    model: RetroModel,
    prompt: Sequence[int],
    chunks: Sequence[Sequence[Sequence[int]]],
    max_new_tokens: int,
    *,
    sampling: SamplingConfig = GREEDY,
    eod: int | None = None,
    vocab_size: int | None = None,
) -> list[int]:
    """Up to `max_new_tokens` after a prompt, ending early with `eod`, which is then the last one.

    chunks: the tokens of the neighbours of each of its first whole chunks; empty lists for a chunk
    without any. vocab_size: tokens that the tokenizer knows. The model should be in eval mode."""
    check_length(
        f"the prompt of {len(prompt)} tokens", len(prompt), max_new_tokens, model.config.positions
    )
    request = Request(
        prompt=prompt,
        max_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=frozenset() if eod is None else frozenset({eod}),
    )
    return run_requests(NeighborDecoder(model, chunks, vocab_size), [request]).outputs[0]
