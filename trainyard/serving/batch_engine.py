"""An engine for every family that generates: requests in batches that start together.

The static engine behind the interface of `inference.engine`: the next batch starts when the last
request of this one has ended. For models that no engine with a paged cache runs.

Rank 0 decides, and tells the other ranks of the model before each pass what they compute with it:
prompts, tokens, nothing (so that they do not give up waiting), or the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainyard.errors import ConfigError
from trainyard.inference.decoders import Decoder, Start
from trainyard.inference.engine import EngineStats, Update
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.log_probs import take_tokens
from trainyard.inference.request import Completion, Request
from trainyard.inference.sampling import Sampler
from trainyard.inference.static import keep_prompt_scores, top_n_of_prompts
from trainyard.inference.texts import build_decoder, check_prompt
from trainyard.parallel.groups import broadcast_object


@dataclass(frozen=True, slots=True)
class Pass:
    """What all ranks of a model compute next."""

    kind: Literal["start", "step", "wait", "end"]
    prompts: Sequence[Sequence[int]] = ()
    max_tokens: int = 0
    """Of `start`: most new tokens of a row."""
    top_n: int | None = None
    tokens: Sequence[int] = ()
    """Of `step`: the next one of each row."""


class BatchPasses:
    """One rank's share of the passes."""

    def __init__(self, generator: ModelOnRanks) -> None:
        self.generator = generator
        self._decoder: Decoder | None = None

    @torch.inference_mode()
    def run(self, work: Pass) -> Start:
        """(rows, V) logits, and the scores of prompts if they begin."""
        if work.kind == "start":
            longest = max(map(len, work.prompts))
            self._decoder = None  # its memory is free for the next one
            self._decoder = build_decoder(
                self.generator, len(work.prompts), longest, work.max_tokens
            )
            return self._decoder.start(work.prompts, work.top_n)
        assert self._decoder is not None
        device = self.generator.model.device
        return Start(self._decoder.step(torch.tensor(work.tokens, device=device)))


class BatchFollower:
    """Any rank but the first."""

    def __init__(self, generator: ModelOnRanks) -> None:
        self._generator = generator

    def run(self) -> None:
        """Compute what the first rank does, until its engine is closed."""
        passes = BatchPasses(self._generator)
        while True:
            work = broadcast_object(Pass("wait"), self._generator.groups.world)
            if work.kind == "end":
                return
            if work.kind != "wait":
                passes.run(work)


class BatchEngine:
    """Implements `inference.engine.Engine`, on the first rank."""

    def __init__(
        self, generator: ModelOnRanks, max_requests: int, max_seq_length: int | None = None
    ) -> None:
        """max_requests: of a batch. max_seq_length: most tokens of a prompt with its output; unset:
        what the model has positions for."""
        self._generator, self._max_requests = generator, max_requests
        self._passes = BatchPasses(generator)
        self._waiting: dict[int, tuple[int, Request]] = {}
        """(priority, request) by number."""
        self._rows: list[tuple[int, Completion]] = []
        self._cancelled: set[int] = set()
        self._sampler: Sampler | None = None
        self._chosen: list[int] = []
        self._next = 0
        self._prompt_tokens = self._generated = 0
        positions = generator.config.positions
        if generator.config.model_type == "t5":
            positions *= 2  # the prompt is the encoder's, the output the decoder's
        self.max_tokens = min(max_seq_length or positions, positions)

    def add(self, request: Request, *, priority: int = 0) -> int:
        """See `Engine`."""
        if not request.prompt:
            raise ConfigError("the prompt has no tokens; give it at least one")
        if (total := len(request.prompt) + request.max_tokens) > self.max_tokens:
            raise ConfigError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones make "
                f"{total}, and the engine has room for {self.max_tokens}; shorten one"
            )
        check_prompt(self._generator.config, "the prompt", len(request.prompt), request.max_tokens)
        number, self._next = self._next, self._next + 1
        self._waiting[number] = (priority, request)
        return number

    def cancel(self, number: int) -> None:
        """See `Engine`. A running batch still computes the row to its end, then drops it."""
        if self._waiting.pop(number, None) is None:
            self._cancelled.add(number)

    def has_work(self) -> bool:
        """See `Engine`."""
        return bool(self._waiting) or self._is_running()

    def step(self) -> list[Update]:
        """See `Engine`."""
        if not self._is_running():
            self._rows.clear()
            self._cancelled.clear()
            if not self._waiting:
                self._tell(Pass("wait"))
                return []
            logits = self._start()
        else:
            work = Pass("step", tokens=[max(token, 0) for token in self._chosen])
            self._tell(work)
            logits = self._passes.run(work).logits
        return self._collect(logits)

    def stats(self) -> EngineStats:
        """See `Engine`. There are no blocks."""
        running = sum(not c.is_done and n not in self._cancelled for n, c in self._rows)
        return EngineStats(
            num_running=running,
            num_waiting=len(self._waiting),
            blocks_used=0,
            blocks_total=0,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=0,
            generated_tokens=self._generated,
            preemptions=0,
        )

    def close(self) -> None:
        """Let the other ranks end."""
        self._tell(Pass("end"))

    def _is_running(self) -> bool:
        return any(not c.is_done and n not in self._cancelled for n, c in self._rows)

    def _tell(self, work: Pass) -> None:
        broadcast_object(work, self._generator.groups.world)

    @torch.inference_mode()
    def _start(self) -> Tensor:
        """Begin the next batch; its first logits."""
        order = sorted(self._waiting, key=lambda number: (self._waiting[number][0], number))
        for number in self._fitting(order[: self._max_requests]):
            _, request = self._waiting.pop(number)
            self._rows.append((number, Completion(request)))
        completions = [completion for _, completion in self._rows]
        requests = [completion.request for completion in completions]
        self._sampler = Sampler(completions)
        work = Pass(
            "start",
            prompts=[list(request.prompt) for request in requests],
            max_tokens=max(1, *(request.max_tokens for request in requests)),
            top_n=top_n_of_prompts(requests),
        )
        self._tell(work)
        start = self._passes.run(work)
        keep_prompt_scores(start, completions)
        self._prompt_tokens += sum(len(request.prompt) for request in requests)
        return start.logits

    def _fitting(self, numbers: Sequence[int]) -> list[int]:
        """As many as together have positions for their longest prompt and longest output."""
        kept: list[int] = []
        longest = new = 0
        config = self._generator.config
        for number in numbers:
            _, request = self._waiting[number]
            longest, new = max(longest, len(request.prompt)), max(new, request.max_tokens)
            if kept and config.model_type != "t5" and longest + new > config.positions:
                break
            kept.append(number)
        return kept

    @torch.inference_mode()
    def _collect(self, logits: Tensor) -> list[Update]:
        assert self._sampler is not None
        completions = [completion for _, completion in self._rows]
        open_rows = [row for row, completion in enumerate(completions) if not completion.is_done]
        for completion in completions:
            if not all(map(math.isfinite, completion.prompt_log_probs)):
                completion.is_broken = True
            elif not completion.request.max_tokens:  # its prompt is scored alone
                completion.finish_reason = "length"
        before = [len(completion.tokens) for completion in completions]
        self._chosen = self._sampler.choose(logits)
        take_tokens(logits, self._chosen, completions)
        counts = [len(c.tokens) - b for c, b in zip(completions, before, strict=True)]
        self._generated += sum(counts)
        return [
            Update(number=self._rows[row][0], num_new=counts[row], completion=completions[row])
            for row in open_rows
            if self._rows[row][0] not in self._cancelled
        ]
