"""Compares log-probabilities of the training's forward pass with those of the engines.

A model that was trained by one forward and is served by another, with a cache, in blocks and in
chunks, is only the same model if both give the same probabilities. Each engine continues the same
prompts; the training's forward then scores the whole texts at once, without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainyard.evaluation.scoring import Request as ScoredText
from trainyard.evaluation.scoring import Score, Scorer
from trainyard.inference.decoders import CachedDecoder
from trainyard.inference.dynamic.build import build_engine
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.request import BrokenOutputError, Completion, Request
from trainyard.inference.static import run_requests
from trainyard.parallel.groups import broadcast_object

SMALL_BLOCK = 8
"""Tokens of a block where prompts are to fill several; also what a step computes of them."""


@dataclass(frozen=True, slots=True)
class ParityRow:
    """How far one engine is from the training's forward, over all its texts."""

    engine: str
    num_prompt_tokens: int
    """Scored tokens of prompts."""
    num_new_tokens: int
    max_difference: float
    """Largest difference of a token's log-probability, in nats."""
    mean_difference: float
    """Mean of the absolute differences."""
    num_likeliest: int
    """New tokens that the training's forward finds the likeliest, as the engine did."""

    def document(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class EngineText:
    """A text as an engine made and scored it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Of the last tokens: the output, and where they were computed those of the prompt from the
    second on."""

    @classmethod
    def of(cls, completion: Completion) -> EngineText:
        """BrokenOutputError for one whose logits were not numbers."""
        if completion.is_broken:
            raise BrokenOutputError
        return cls(
            prompt=tuple(completion.request.prompt),
            output=tuple(completion.tokens),
            log_probs=(*completion.prompt_log_probs, *completion.log_probs),
        )

    @property
    def scored(self) -> ScoredText:
        """The same for the training's forward."""
        return ScoredText((*self.prompt, *self.output), len(self.log_probs))


def measure_parity(
    loaded: ModelOnRanks, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[ParityRow]:
    """A row for each engine and way of using it; all ranks of one copy of the model call this.

    prompts: tokens, at least one each. Raises BrokenOutputError for a model without numbers."""
    scorer, rows = Scorer(loaded.model, loaded.groups), []
    for name, texts in _texts_of_engines(loaded, prompts, max_new_tokens):
        shared = broadcast_object(texts, loaded.groups.world)
        rows.append(row_of(name, shared, scorer.score([text.scored for text in shared])))
    return rows


def row_of(engine: str, texts: Sequence[EngineText], scores: Sequence[Score]) -> ParityRow:
    """Compare the log-probabilities of texts with the scores of the training's forward."""
    differences, likeliest = [], 0
    for text, score in zip(texts, scores, strict=True):
        pairs = zip(text.log_probs, score.losses, strict=True)
        differences += [abs(log_prob + loss) for log_prob, loss in pairs]
        found = score.predicted[-len(text.output) :]
        likeliest += sum(a == b for a, b in zip(text.output, found, strict=True))
    new = sum(len(text.output) for text in texts)
    return ParityRow(
        engine=engine,
        num_prompt_tokens=len(differences) - new,
        num_new_tokens=new,
        max_difference=max(differences),
        mean_difference=sum(differences) / len(differences),
        num_likeliest=likeliest,
    )


def _texts_of_engines(
    loaded: ModelOnRanks, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Iterator[tuple[str, list[EngineText]]]:
    """What each engine makes, greedily; ranks that follow a dynamic engine have no texts of it."""
    requests = [
        Request(
            prompt=prompt,
            max_tokens=max_new_tokens,
            number=number,
            log_probs=True,
            prompt_log_probs=True,
        )
        for number, prompt in enumerate(prompts)
    ]
    alone = [text for request in requests for text in _static(loaded, [request])]
    yield "static, one by one", alone
    yield "static, one batch", _static(loaded, requests)
    whole = DynamicConfig(inference_dynamic_batching_max_requests=len(prompts))
    yield "dynamic, whole prompts", _dynamic(loaded, requests, whole)
    small = replace(
        whole,
        inference_dynamic_batching_block_size=SMALL_BLOCK,
        inference_dynamic_batching_max_tokens=max(SMALL_BLOCK, len(prompts)),
    )
    yield "dynamic, prompts in chunks", _dynamic(loaded, requests, small)
    known = [replace(request, prompt_log_probs=False) for request in requests]
    yield "dynamic, prompts in the cache", _dynamic(loaded, known, small, times=2)


def _static(loaded: ModelOnRanks, requests: Sequence[Request]) -> list[EngineText]:
    room = max(len(request.prompt) + request.max_tokens for request in requests)
    size = loaded.tokenizer.vocab_size
    decoder = CachedDecoder(loaded.model, len(requests), room, loaded.groups, size)
    return [EngineText.of(each) for each in run_requests(decoder, requests).completions]


def _dynamic(
    loaded: ModelOnRanks, requests: Sequence[Request], config: DynamicConfig, times: int = 1
) -> list[EngineText]:
    """The texts of the last of several times, by one engine; none on the other ranks."""
    room = max(len(request.prompt) + request.max_tokens for request in requests)
    engine = build_engine(loaded, config, max_seq_length=room)
    if not isinstance(engine, DynamicEngine):
        engine.run()
        return []
    with engine:
        for _ in range(times):
            completions: dict[int, Completion] = {}
            numbers = [engine.add(request) for request in requests]
            while engine.has_work():
                completions |= {update.number: update.completion for update in engine.step()}
        return [EngineText.of(completions[number]) for number in numbers]
