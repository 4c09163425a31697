"""The requests of a load test, before any is sent: prompts, output lengths, times of a trace.

Pure functions of options, seeds and the lines of a file: the same ones give the same requests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainyard import json_text
from trainyard.errors import DataError
from trainyard.load_test.lengths import LengthDistribution

BLOCK_TOKENS = 512
"""Tokens that one of the `hash_ids` of a trace stands for, as in Mooncake's published traces."""

MAX_LENGTH = 2**24
"""Tokens of a prompt or an output of a trace, above every context: prompts are made in memory."""

LEAST_TIME, MOST_TIME = 0.0, 1e12
"""Milliseconds of a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """A request that is still to be sent."""

    index: int
    """Place in the measurement; with the seed, it decides what is sampled."""
    prompt: str | tuple[int, ...]
    """A text, or tokens."""
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLine:
    """A request of a recorded load."""

    at: float
    """Seconds since the first one."""
    text: str | None
    """None: a prompt is made of `num_tokens` tokens."""
    num_tokens: int
    max_tokens: int | None
    """None: as the options say."""
    blocks: tuple[int, ...]
    """For each 512 tokens of a made prompt a number; equal ones are equal tokens, so that prompts
    share their beginnings as the recorded ones did."""


def stream(seed: int, name: str) -> random.Random:
    """Random numbers of one purpose, independent of those of others."""
    return random.Random(f"{seed} {name}")


class PromptMaker:
    """Random prompts of ordinary tokens."""

    def __init__(self, ordinary: Sequence[int], seed: int) -> None:
        """ordinary: the tokens that a prompt may have."""
        assert len(ordinary), "a vocabulary without ordinary tokens"
        self._ordinary, self._seed = ordinary, seed

    def of_length(self, index: int, length: int) -> tuple[int, ...]:
        """The prompt of a request; another one for each index."""
        return self._draw(f"request {index}", length)

    def of_blocks(self, blocks: Sequence[int], index: int, length: int) -> tuple[int, ...]:
        """A prompt whose first tokens are those of the blocks, and the rest its own."""
        shared = blocks[: -(-length // BLOCK_TOKENS)]
        tokens = [token for block in shared for token in self._draw(f"block {block}", BLOCK_TOKENS)]
        rest = max(length - len(tokens), 0)
        return (*tokens[:length], *self.of_length(index, rest))

    def _draw(self, name: str, count: int) -> tuple[int, ...]:
        return tuple(stream(self._seed, name).choices(self._ordinary, k=count))


def synthetic_requests(
    count: int,
    maker: PromptMaker,
    inputs: LengthDistribution,
    outputs: LengthDistribution,
    seed: int,
) -> list[PlannedRequest]:
    """Random prompts, with lengths of these distributions."""
    lengths = zip(
        inputs.sample(count, stream(seed, "input lengths")),
        outputs.sample(count, stream(seed, "output lengths")),
        strict=True,
    )
    return [
        PlannedRequest(index=i, prompt=maker.of_length(i, length), max_tokens=new)
        for i, (length, new) in enumerate(lengths)
    ]


def text_requests(
    count: int,
    prompts: Sequence[str | tuple[int, ...]],
    outputs: LengthDistribution,
    seed: int,
) -> list[PlannedRequest]:
    """The prompts in their order, from the first again after the last."""
    lengths = outputs.sample(count, stream(seed, "output lengths"))
    return [
        PlannedRequest(index=i, prompt=prompts[i % len(prompts)], max_tokens=new)
        for i, new in enumerate(lengths)
    ]


def trace_requests(
    lines: Sequence[TraceLine],
    maker: PromptMaker | None,
    outputs: LengthDistribution,
    seed: int,
) -> list[PlannedRequest]:
    """The requests of a trace. maker: needed where a line has no text."""
    lengths = outputs.sample(len(lines), stream(seed, "output lengths"))
    requests = []
    for index, (line, new) in enumerate(zip(lines, lengths, strict=True)):
        prompt: str | tuple[int, ...]
        if line.text is not None:
            prompt = line.text
        else:
            assert maker is not None, "a trace of lengths without a tokenizer"
            prompt = maker.of_blocks(line.blocks, index, line.num_tokens)
        most = new if line.max_tokens is None else line.max_tokens
        requests.append(PlannedRequest(index=index, prompt=prompt, max_tokens=most))
    return requests


# --- traces -----------------------------------------------------------------------------------


def read_trace(content: bytes, name: str) -> list[TraceLine]:
    """The lines of a trace in JSONL, by time, the first at 0.

    Keys, as in Mooncake's traces and for AIPerf: `timestamp` in milliseconds; `text_input`, or
    `input_length` with or without `hash_ids`; `output_length`. DataError for any other line."""
    try:
        texts = content.decode().split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8: {error}") from None
    lines = [_line(text, f"{name}, line {i}") for i, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise DataError(f"{name}: holds no request; write one as JSON on each line")
    lines.sort(key=lambda line: line.at)
    return [replace(line, at=line.at - lines[0].at) for line in lines]


def _line(text: str, name: str) -> TraceLine:
    try:
        document: Any = json_text.loads(text)
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None
    if not isinstance(document, dict):
        raise DataError(f"{name}: is no object; see docs/benchmarking.md for the keys")
    at: Any = document.get("timestamp")
    is_number = isinstance(at, int | float) and not isinstance(at, bool)
    if not is_number or not LEAST_TIME <= at <= MOST_TIME:
        raise DataError(f"{name}: 'timestamp' must be milliseconds from 0 on, got {at!r:.40}")
    words = document.get("text_input")
    if words is not None and (not isinstance(words, str) or not words):
        raise DataError(f"{name}: 'text_input' must be a text of at least a character")
    length = _length(document, "input_length", name)
    if words is None and length is None:
        raise DataError(f"{name}: has neither 'text_input' nor 'input_length'")
    blocks = document.get("hash_ids") or []
    if not isinstance(blocks, list) or any(type(b) is not int or b < 0 for b in blocks):
        raise DataError(f"{name}: 'hash_ids' must be a list of numbers from 0 on")
    return TraceLine(
        at=at / 1e3,
        text=words,
        num_tokens=length or 0,
        max_tokens=_length(document, "output_length", name),
        blocks=tuple(blocks),
    )


def _length(document: Mapping[str, Any], key: str, name: str) -> int | None:
    value = document.get(key)
    if value is not None and (type(value) is not int or not 1 <= value <= MAX_LENGTH):
        raise DataError(
            f"{name}: {key!r} must be a number of tokens from 1 to {MAX_LENGTH}, got {value!r:.40}"
        )
    return value
