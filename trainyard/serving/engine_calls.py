"""What the process of an engine computes beside requests: beam search, and Retro's neighbours.

Values come and go as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from trainyard.inference.beam import beam_search
from trainyard.inference.config import SamplingConfig
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.neighbors import generate_with_neighbors
from trainyard.inference.texts import build_decoder
from trainyard.serving.engine_side import Calls


def calls_of(generator: ModelOnRanks) -> Calls:
    """By their names."""
    return {
        "beam_search": partial(search, generator),
        "with_neighbors": partial(continue_with_neighbors, generator),
    }


def search(
    generator: ModelOnRanks,
    *,
    prompt: Sequence[int],
    count: int,
    width: int,
    length_penalty: float,
    end: int,
) -> list[tuple[float, list[int]]]:
    """(score, tokens) of the best texts of at most `count` new tokens, the best first."""
    found = beam_search(
        build_decoder(generator, width, len(prompt), count),
        prompt,
        count,
        width=width,
        length_penalty=length_penalty,
        end=end,
    )
    return [(text.score, text.tokens) for text in found]


def continue_with_neighbors(
    generator: ModelOnRanks,
    *,
    prompt: Sequence[int],
    chunks: Sequence[Sequence[Sequence[int]]],
    count: int,
    sampling: dict[str, Any],
) -> list[int]:
    """At most `count` new tokens."""
    return generate_with_neighbors(
        generator.model,
        prompt,
        chunks,
        count,
        sampling=SamplingConfig(**sampling),
        eod=generator.end_token,
        vocab_size=generator.tokenizer.vocab_size,
    )
