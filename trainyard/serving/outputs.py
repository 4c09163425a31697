"""From what a client asks for to requests of the engine, and from their pieces to texts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trainyard.inference.config import SamplingConfig
from trainyard.inference.request import FinishReason, Request, TopTokens
from trainyard.inference.stop_words import INCOMPLETE, LineEnds, StopWords
from trainyard.retrieval.shape import NeighborShape
from trainyard.serving.config import DefaultsConfig, LimitConfig
from trainyard.serving.errors import bad_request
from trainyard.serving.metrics import Metrics
from trainyard.serving.service import EngineService, Stream
from trainyard.serving.text_stream import TextStream
from trainyard.serving.wire import Piece
from trainyard.tokenizers.base import Tokenizer

MAX_SEED = 2**31 - 1


@dataclass(frozen=True)
class ServedModel:
    """A model that clients may use."""

    name: str
    tokenizer: Tokenizer
    end_token: int
    """That ends an output unless another one is named."""
    service: EngineService
    limits: LimitConfig
    defaults: DefaultsConfig
    kind: str = "gpt"
    """Family of the model."""
    num_ranks: int = 1
    """That share the model; what the engine is called for beside requests needs it on one."""
    neighbors: NeighborShape | None = None
    """What a Retro takes beside a prompt."""
    created: int = 0
    """Seconds since 1970 at which it was loaded."""

    @property
    def continues(self) -> bool:
        """Whether an output continues its prompt; that of a T5 answers it."""
        return self.kind != "t5"

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """See `EngineService.call`; TimeoutError after the time of a request."""
        async with asyncio.timeout(self.limits.request_timeout_seconds):
            return await self.service.call(name, arguments)

    @cached_property
    def metrics(self) -> Metrics:
        """What is measured."""
        return Metrics(self.service)

    @cached_property
    def seeds(self) -> random.Random:
        """Of the seeds of requests that name none."""
        return random.Random(self.defaults.seed)

    @cached_property
    def line_ends(self) -> LineEnds:
        """For `prevent_newline_after_colon`."""
        return LineEnds(self.tokenizer)

    def token_text(self, token: int) -> str:
        """The text of one token; a part of a character is named by its number."""
        text = self.tokenizer.decode([token])
        return f"token_id:{token}" if INCOMPLETE in text else text

    def seed_of(self, given: int | None) -> int:
        """The seed of a request."""
        return self.seeds.randint(0, MAX_SEED) if given is None else given


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How a client wants prompts continued."""

    max_tokens: int
    """Most new tokens; 0: the prompt is scored alone."""
    sampling: SamplingConfig
    min_tokens: int = 0
    stop_words: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    log_probs: bool = False
    prompt_log_probs: bool = False
    top_n: int = 0
    prevent_newline_after_colon: bool = False


def make_requests(
    served: ServedModel, prompts: Sequence[Sequence[int]], options: TextOptions
) -> list[Request]:
    """The requests of prompts. RequestError for one that is too long, or too many."""
    if len(prompts) > served.limits.max_prompts:
        raise bad_request(
            f"{len(prompts)} texts in one request, and at most {served.limits.max_prompts} may be: "
            "prompts, times n or best_of"
        )
    if options.prompt_log_probs and not served.continues:
        raise bad_request("this model reads a prompt whole, so its tokens have no probabilities")
    vocab_size = served.tokenizer.vocab_size
    for stop in sorted(options.stop_ids):
        if stop >= vocab_size:
            raise bad_request(f"the token {stop} ends no text: the tokenizer has {vocab_size}")
    most = served.service.max_tokens
    for place, prompt in enumerate(prompts):
        if len(prompt) + options.max_tokens > most:
            raise bad_request(
                f"prompt {place} has {len(prompt)} tokens and {options.max_tokens} are to be "
                f"generated, and the model takes {most} together; shorten one"
            )
        if any(not 0 <= token < vocab_size for token in prompt):
            raise bad_request(f"prompt {place}: tokens must be in [0, {vocab_size})", "prompt")
    words = options.stop_words
    return [
        Request(
            prompt=prompt,
            max_tokens=options.max_tokens,
            sampling=options.sampling,
            number=number,
            min_tokens=options.min_tokens,
            stop_ids=options.stop_ids,
            is_stop=StopWords(served.tokenizer, words) if words else None,
            banned_after=served.line_ends if options.prevent_newline_after_colon else None,
            log_probs=options.log_probs,
            prompt_log_probs=options.prompt_log_probs,
            top_n=options.top_n,
        )
        for number, prompt in enumerate(prompts)
    ]


@dataclass
class Output:
    """One text so far."""

    request: Request
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Characters of the text before each token; only with log-probabilities."""
    log_probs: list[float] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top: list[TopTokens] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, piece: Piece) -> str:
        """Take a piece; returns the text that it completes."""
        self.tokens += piece.tokens
        self.log_probs += piece.log_probs
        self.top += piece.top
        self.prompt_log_probs += piece.prompt_log_probs
        self.prompt_top += piece.prompt_top
        self.finish_reason = piece.finish_reason
        if not piece.tokens or not self.request.log_probs:
            return self.stream.push(piece.tokens, piece.finish_reason)
        text, last = "", len(piece.tokens) - 1
        for place, token in enumerate(piece.tokens):
            self.offsets.append(self.stream.length)
            text += self.stream.push([token], piece.finish_reason if place == last else None)
        return text

    @property
    def text(self) -> str:
        """The text without what ended it."""
        return self.stream.text

    @property
    def mean_log_prob(self) -> float:
        """Of its tokens, by which `best_of` compares."""
        return sum(self.log_probs) / max(len(self.log_probs), 1)


@dataclass(slots=True)
class Step:
    """What a piece did to one output."""

    index: int
    """Of the output."""
    output: Output
    text: str
    """That is new."""
    num_new: int
    """Tokens that are new."""


class Outputs:
    """The texts of one request of a client, as they come."""

    def __init__(
        self, served: ServedModel, prompts: Sequence[Sequence[int]], options: TextOptions
    ) -> None:
        """Raises RequestError for prompts that are too long or too many."""
        self._service, self._metrics = served.service, served.metrics
        self._seconds = served.limits.request_timeout_seconds
        self._requests = make_requests(served, prompts, options)
        self.all = [
            Output(
                request,
                TextStream(
                    served.tokenizer.decode,
                    request.prompt if served.continues else (),
                    stop_ids=request.stop_ids,
                    stop_words=options.stop_words,
                ),
            )
            for request in self._requests
        ]

    async def steps(self, *, at_ends: bool = False) -> AsyncGenerator[Step, None]:
        """Run them. at_ends: the steps before a text's end may come together with its last one.

        Raises what `EngineService.open` and `Stream` do, and TimeoutError; requests that are open
        then, or when the iterator is closed, are cancelled."""
        clock = asyncio.get_running_loop().time
        began = clock()
        with (
            self._service.open(self._requests, wakes_at_ends=at_ends) as stream,
            _ending(stream, began + self._seconds),
        ):
            async for index, piece in stream:
                output = self.all[index]
                text = output.add(piece)
                if output.tokens and len(output.tokens) == len(piece.tokens):
                    self._metrics.first_token.observe(stream.began_at[index] - began)
                if piece.finish_reason is not None and len(output.tokens) > 1:
                    seconds = clock() - stream.began_at[index]
                    self._metrics.per_token.observe(seconds / (len(output.tokens) - 1))
                yield Step(index, output, text, len(piece.tokens))

    async def finish(self) -> list[Output]:
        """Run all to their ends."""
        async with aclosing(self.steps(at_ends=True)) as steps:
            async for _ in steps:
                pass
        return self.all


@contextmanager
def _ending(stream: Stream, deadline: float) -> Iterator[None]:
    """End a stream with a TimeoutError at a time of the loop's clock, even if its reader waits for
    a client that does not read: one timer for all of its pieces."""
    timer = asyncio.get_running_loop().call_at(deadline, stream.fail, TimeoutError())
    try:
        yield
    finally:
        timer.cancel()
