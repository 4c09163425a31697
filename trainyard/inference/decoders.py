"""Models at work on a fixed batch: logits of the next token, step by step.

Long prompts pass the model some rows at a time, so that what layers need beside the cache does not
grow with the batch. A decoder holds the keys and values of its batch, and the states of layers that
keep those instead. Under tensor and pipeline parallelism every rank of a model calls the same
methods with the same tokens, and gets the same logits. s tokens, b batch, h hidden, V
vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainyard.inference.graphs import FixedStep
from trainyard.inference.kv_cache import FixedShapeCache, StaticKVCache
from trainyard.inference.log_probs import Scores, no_scores, score_places
from trainyard.inference.pipeline import StageChain
from trainyard.models.costs.inference_memory import rows_at_once
from trainyard.models.gpt.model import GPTModel
from trainyard.models.model import TransformerModel
from trainyard.models.t5.model import T5Model
from trainyard.parallel.groups import ALONE, ProcessGroups

PADDING = 0
"""Token behind a short prompt; nothing sees it."""


class Start(NamedTuple):
    """What a pass over prompts gives."""

    logits: Tensor
    """(b, V) after the last token of each prompt."""
    scores: Scores | None = None
    """Of the tokens of the prompts from the second on, (s - 1, b); None if not asked for."""


class Decoder(Protocol):
    """What the engine needs of a model."""

    cache_bytes: int
    """Memory of all keys, values and states."""

    def start(self, prompts: Sequence[Sequence[int]], top_n: int | None = None) -> Start:
        """Begin a batch, the first or a next one of the same size. top_n: score the prompts too,
        with this many likeliest tokens."""

    def step(self, tokens: Tensor) -> Tensor:
        """(b, V) logits after the next token of each row, (b) int64."""

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of row `rows[i]`."""


class Stepping:
    """What both kinds of decoders share: layers over stages, the output layer on the last."""

    def __init__(
        self, model: TransformerModel, groups: ProcessGroups, vocab_size: int | None
    ) -> None:
        self.model, self.chain = model, StageChain(groups)
        self.vocab_size = min(vocab_size or model.true_vocab_size, model.true_vocab_size)
        config = model.config
        self._stream = torch.float32 if config.fp32_residual_connection else model.dtype

    def through(
        self, num_new: int, batch: int, layers: Callable[[Tensor | None], Tensor]
    ) -> Tensor:
        """Output of this stage's layers; `layers` takes what the previous stage sent."""
        received = None
        if not self.chain.is_first:
            shape = (num_new, batch, self.model.config.hidden_size)
            received = self.chain.receive(shape, self._stream, self.model.device)
        out = layers(received)
        self.chain.send(out)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """(b, V) on every stage. hidden: (b, h), of the last stage."""
        own = self._own_logits(hidden) if self.chain.is_last else None
        shape = (hidden.shape[0], self.vocab_size)
        return self.chain.from_last(own, shape, self.model.dtype, hidden.device)

    def _own_logits(self, hidden: Tensor) -> Tensor:
        assert isinstance(self.model, GPTModel | T5Model)
        return self.model.logits(hidden)[..., : self.vocab_size]


class CachedDecoder(Stepping):
    """A GPT with a cache; a Mamba, a hybrid, and a Retro without neighbours too."""

    def __init__(
        self,
        model: GPTModel,
        batch_size: int,
        capacity: int,
        groups: ProcessGroups = ALONE,
        vocab_size: int | None = None,
        *,
        compiled: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """capacity: tokens of the longest row with its output. compiled: see `graphs`; for a model
        on one rank. kv_dtype: of keys and values in the cache; unset: the model's."""
        super().__init__(model, groups, vocab_size)
        self._gpt = model
        self.cache = (FixedShapeCache if compiled else StaticKVCache)(
            model.config,
            batch_size,
            capacity,
            layers=model.decoder.numbers,
            tp_size=model.parallel.tp_size,
            dtype=model.dtype,
            kv_dtype=kv_dtype,
            device=model.device,
        )
        self.cache_bytes = self.cache.size_bytes
        self._fixed_step: FixedStep | None = None
        if isinstance(self.cache, FixedShapeCache):
            self._fixed_step = FixedStep(model, self.cache, self.vocab_size)

    def start(self, prompts: Sequence[Sequence[int]], top_n: int | None = None) -> Start:
        """See `Decoder`."""
        self.cache.clear()
        longest = max(len(prompt) for prompt in prompts)
        count = rows_at_once(len(prompts), longest)
        if count == len(prompts):
            return self._started(self.cache, prompts, top_n)
        starts = []
        for first in range(0, len(prompts), count):
            rows = slice(first, min(first + count, len(prompts)))
            part = self.cache.of_rows(rows)
            starts.append(self._started(part, prompts[rows], top_n))
            self.cache.lengths[rows] = part.lengths
        return joined(starts)

    def _started(
        self, cache: StaticKVCache, prompts: Sequence[Sequence[int]], top_n: int | None
    ) -> Start:
        tokens, counts = padded(prompts, self.model.device), [len(p) for p in prompts]
        hidden = self._hidden(cache, tokens, counts)
        logits = self.logits(last_of(hidden, counts))
        scores = None if top_n is None else self._scores(hidden, tokens, top_n)
        return Start(logits, scores)

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder`."""
        if self._fixed_step is not None:
            return self._fixed_step(tokens)
        hidden = self._hidden(self.cache, tokens.unsqueeze(1), [1] * len(tokens))
        return self.logits(hidden[-1])

    def reorder(self, rows: Sequence[int]) -> None:
        """See `Decoder`."""
        self.cache.reorder(rows)

    def _hidden(self, cache: StaticKVCache, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        def layers(received: Tensor | None) -> Tensor:
            return self._gpt.hidden_states(tokens, kv_cache=cache, received=received)

        cache.begin(counts)
        hidden = self.through(tokens.shape[1], tokens.shape[0], layers)
        cache.advance()
        return hidden

    def _scores(self, hidden: Tensor, tokens: Tensor, top_n: int) -> Scores | None:
        """Of the tokens from the second on, (s - 1, b), on every stage."""
        batch, count, device = tokens.shape[0], tokens.shape[1] - 1, tokens.device
        if not count:
            return no_scores(0, batch, top_n, device)
        top_n = min(top_n, self.vocab_size)
        own = no_scores(count, batch, top_n, device)
        if self.chain.is_last:
            targets = tokens[:, 1:].t()
            own = score_places(hidden[:-1], targets, self._own_logits, top_n, self.vocab_size)
        shared = (self.chain.from_last(x, tuple(x.shape), x.dtype, device) for x in own)
        return Scores(*shared)


class EncoderDecoder(Stepping):
    """A T5: prompts are texts of the encoder, outputs follow a first token of the decoder."""

    def __init__(
        self,
        model: T5Model,
        batch_size: int,
        max_tokens: int,
        first_token: int,
        groups: ProcessGroups = ALONE,
        vocab_size: int | None = None,
    ) -> None:
        """first_token: of the decoder, before any output."""
        super().__init__(model, groups, vocab_size)
        self._t5, self._first_token = model, first_token
        self.cache = StaticKVCache(
            model.config,
            batch_size,
            max_tokens,
            layers=model.decoder.numbers,
            tp_size=model.parallel.tp_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._source_cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.cache_bytes = self.cache.size_bytes

    def start(self, prompts: Sequence[Sequence[int]], top_n: int | None = None) -> Start:
        """See `Decoder`. Texts of an encoder have no scores."""
        self.cache.clear()
        self._source_cache.clear()
        tokens = padded(prompts, self.model.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=tokens.device)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        self._padding = (places < lengths.unsqueeze(1)).long()

        def encoder(received: Tensor | None) -> Tensor:
            return self._t5.encode(tokens, self._padding, received)

        self._source = self.through(tokens.shape[1], tokens.shape[0], encoder)
        first = torch.full((len(prompts),), self._first_token, device=tokens.device)
        logits = self.step(first)
        self.cache_bytes = self.cache.size_bytes + sum(
            kept.numel() * kept.element_size() for kv in self._source_cache.values() for kept in kv
        )
        return Start(logits)

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder`."""
        column = tokens.unsqueeze(1)

        def decoder(received: Tensor | None) -> Tensor:
            return self._t5.decode(
                column, self._source, self._padding, self.cache, self._source_cache, received
            )

        self.cache.begin([1] * len(tokens))
        hidden = self.through(1, len(tokens), decoder)
        self.cache.advance()
        return self.logits(hidden[-1])

    def reorder(self, rows: Sequence[int]) -> None:
        """See `Decoder`. Beams of one prompt share its encoder's output."""
        self.cache.reorder(rows)


def joined(starts: Sequence[Start]) -> Start:
    """Of one batch, passes over some of its rows each."""
    logits = torch.cat([start.logits for start in starts])
    scores = [start.scores for start in starts if start.scores is not None]
    if not scores:
        return Start(logits)
    return Start(logits, Scores(*(_beside(parts) for parts in zip(*scores, strict=True))))


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """(s, b, ...) of (s of each, b of each, ...), zeros behind the shorter ones."""
    count = max(len(part) for part in parts)
    out = parts[0].new_zeros(count, sum(part.shape[1] for part in parts), *parts[0].shape[2:])
    for part, columns in zip(
        parts, out.split([part.shape[1] for part in parts], dim=1), strict=True
    ):
        columns[: len(part)] = part
    return out


def padded(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(b, s) int64, padding behind short prompts."""
    longest = max(len(prompt) for prompt in prompts)
    rows = [[*prompt, *[PADDING] * (longest - len(prompt))] for prompt in prompts]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def last_of(hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """(b, h) of the last token of each row. hidden: (s, b, h)."""
    rows = torch.arange(len(counts), device=hidden.device)
    return hidden[torch.tensor(counts, device=hidden.device) - 1, rows]
