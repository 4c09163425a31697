"""Runs requests as they come, together, over a paged cache. Implements `engine.Engine`.

The text of a request is that of the static engine and of the request alone, whatever company it
has, in whatever order they came, and whether it was computed once or again, up to rounding of the
matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor

from trainyard.errors import CommunicationError, ConfigError
from trainyard.inference.dynamic.batch import batch_of
from trainyard.inference.dynamic.ranks import Link, Word
from trainyard.inference.dynamic.runner import PagedRunner, StepOutput
from trainyard.inference.dynamic.scheduler import Scheduler, Work
from trainyard.inference.dynamic.scheduler import Sequence as Text
from trainyard.inference.dynamic.speculation import NGrams
from trainyard.inference.engine import EngineStats, Update
from trainyard.inference.log_probs import prompt_scores, take_tokens
from trainyard.inference.request import Completion, Request
from trainyard.inference.sampling import Sampler, generator_of


@dataclass(slots=True, eq=False)
class _Entry:
    """A request that is not done."""

    completion: Completion
    text: Text
    generator: torch.Generator
    ngrams: NGrams = field(default_factory=NGrams)
    was_counted: bool = False
    """Whether the counters of prompts know it."""

    @property
    def request(self) -> Request:
        """What is asked for."""
        return self.completion.request


@dataclass(slots=True)
class _Turn:
    """A request whose logits after its last token, and after its guesses, a step has computed."""

    entry: _Entry
    work: Work
    row: int
    """Of the logits, the first."""
    count: int = 0
    """Tokens that it got."""


@dataclass(slots=True)
class _Counters:
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0


class DynamicEngine:
    """Continuous batching on one rank, or on the first of those that share a model.

    As a context manager it ends the other ranks with it."""

    def __init__(
        self,
        runner: PagedRunner,
        scheduler: Scheduler,
        link: Link,
        *,
        max_tokens: int,
        num_speculative_tokens: int = 0,
    ) -> None:
        """max_tokens: most of a prompt with its output. num_speculative_tokens: guesses of a text
        in a step."""
        self.max_tokens = max_tokens
        self._runner, self._scheduler, self._link = runner, scheduler, link
        self._num_guesses = num_speculative_tokens
        self._entries: dict[int, _Entry] = {}
        self._by_text: dict[Text, _Entry] = {}
        self._next_number = 0
        self._counters = _Counters()

    def __enter__(self) -> DynamicEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        if not isinstance(error, CommunicationError):  # the others are gone, or are told by that
            self.close()

    def close(self) -> None:
        """End the other ranks; nothing may be added after that."""
        self._link.say(Word.END)

    # --- requests -------------------------------------------------------------------------

    def add(self, request: Request, *, priority: int = 0) -> int:
        """See `Engine`."""
        self._check(request)
        number, self._next_number = self._next_number, self._next_number + 1
        text = Text(
            number,
            priority,
            list(request.prompt),
            # Scores need the hidden states of the whole prompt.
            finds_blocks=not request.prompt_log_probs,
        )
        entry = _Entry(Completion(request), text, generator_of(request))
        self._entries[number] = self._by_text[text] = entry
        self._scheduler.add(text)
        return number

    def _check(self, request: Request) -> None:
        """Refuse a request that no step could compute."""
        prompt, vocab = request.prompt, self._runner.vocab_size
        if not prompt:
            raise ConfigError("the prompt has no tokens; give it at least one")
        if (total := len(prompt) + request.max_tokens) > self.max_tokens:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and {request.max_tokens} new ones make {total}, "
                f"and the engine has room for {self.max_tokens}; shorten one"
            )
        if (least := min(prompt)) < 0 or (most := max(prompt)) >= vocab:
            wrong = least if least < 0 else most
            raise ConfigError(
                f"the prompt has token {wrong}, and the model knows tokens 0 to {vocab - 1}; "
                "encode it by the model's tokenizer"
            )

    def cancel(self, number: int) -> None:
        """See `Engine`."""
        if (entry := self._entries.get(number)) is not None:
            self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        self._scheduler.remove(entry.text)
        del self._entries[entry.text.number], self._by_text[entry.text]

    def has_work(self) -> bool:
        """See `Engine`."""
        return bool(self._entries)

    def stats(self) -> EngineStats:
        """See `Engine`."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            blocks_used=pool.num_used,
            blocks_total=pool.num_blocks,
            prompt_tokens=self._counters.prompt_tokens,
            cached_prompt_tokens=self._counters.cached_prompt_tokens,
            generated_tokens=self._counters.generated_tokens,
            preemptions=scheduler.preemptions,
        )

    # --- steps ----------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """See `Engine`."""
        with self._link.errors():
            works = self._scheduler.schedule(self._guess if self._num_guesses else None)
            if not works:
                self._link.say_idle()
                return []
            scored = [self._scored_places(work) for work in works]
            top_n = max(
                (
                    self._by_text[w.sequence].request.top_n
                    for w, places in zip(works, scored, strict=True)
                    if places
                ),
                default=0,
            )
            batch = batch_of(works, scored, top_n)
            self._link.say(Word.STEP, batch)
            output = self._runner.run(batch)
        self._keep_prompt_scores(works, scored, output)
        return self._take(works, output)

    def _guess(self, text: Text) -> tuple[int, ...]:
        """Tokens that may follow, as far as the request takes them behind the certain one."""
        entry = self._by_text[text]
        left = entry.request.max_tokens - len(entry.completion.tokens) - 1
        most = min(self._num_guesses, left)
        return entry.ngrams.guess(text.tokens, most) if most > 0 else ()

    def _scored_places(self, work: Work) -> range:
        """Positions of a work after which the prompt's next token has no score yet."""
        completion = self._by_text[work.sequence].completion
        if not completion.request.prompt_log_probs:
            return range(0)
        begin = max(work.start, len(completion.prompt_log_probs))
        return range(begin, min(work.start + work.num_known, len(completion.request.prompt) - 1))

    def _keep_prompt_scores(
        self, works: Sequence[Work], scored: Sequence[range], output: StepOutput
    ) -> None:
        if output.scores is None:
            return
        begin = 0
        for work, places in zip(works, scored, strict=True):
            completion, end = self._by_text[work.sequence].completion, begin + len(places)
            chosen, top = prompt_scores(output.scores, 0, begin, end)
            completion.prompt_log_probs += chosen
            top_n = completion.request.top_n
            completion.prompt_top += [place[:top_n] for place in top if top_n]
            begin = end

    def _take(self, works: Sequence[Work], output: StepOutput) -> list[Update]:
        """Choose the tokens that a step is for, and say what became of each request."""
        turns, row = [], 0
        for work in works:
            if not work.is_last:
                self._scheduler.advance(work, work.end)
                continue
            entry = self._by_text[work.sequence]
            if not entry.was_counted:
                self._end_prompt(entry)
            turns.append(_Turn(entry, work, row))
            row += 1 + len(work.guesses)
        _choose(turns, output.logits)
        return [self._update(turn) for turn in turns]

    def _end_prompt(self, entry: _Entry) -> None:
        """The prompt is computed: count it, and end a request that wants no more or that broke."""
        entry.was_counted = True
        self._counters.prompt_tokens += len(entry.request.prompt)
        self._counters.cached_prompt_tokens += entry.text.num_found
        if not all(map(math.isfinite, entry.completion.prompt_log_probs)):
            entry.completion.is_broken = True
        elif not entry.request.max_tokens:
            entry.completion.finish_reason = "length"

    def _update(self, turn: _Turn) -> Update:
        """Take note of a request's new tokens."""
        work, count, completion = turn.work, turn.count, turn.entry.completion
        text = work.sequence
        text.tokens += completion.tokens[len(completion.tokens) - count :]
        if not completion.is_broken:  # whose keys and values nobody else shall find
            # The last new token was not an input.
            self._scheduler.advance(work, work.start + work.num_known + max(count - 1, 0))
        self._counters.generated_tokens += count
        if completion.is_done:
            self._forget(turn.entry)
        return Update(number=text.number, num_new=count, completion=completion)


def _choose(turns: Sequence[_Turn], logits: Tensor) -> None:
    """Give each request the token that follows, and one more for each guess that was right."""
    going = [turn for turn in turns if not turn.entry.completion.is_done]
    while going:
        rows = [turn.row + turn.count for turn in going]
        own = logits
        if rows != list(range(len(logits))):
            own = logits[torch.tensor(rows, device=logits.device)]
        completions = [turn.entry.completion for turn in going]
        sampler = Sampler(completions, [turn.entry.generator for turn in going])
        take_tokens(own, sampler.choose(own), completions)
        goes_on = []
        for turn in going:
            place, completion, guesses = turn.count, turn.entry.completion, turn.work.guesses
            turn.count += not completion.is_broken
            if completion.is_done or place == len(guesses):
                continue
            if completion.tokens[-1] == guesses[place]:
                goes_on.append(turn)
        going = goes_on
