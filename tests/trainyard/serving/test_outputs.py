"""Texts from pieces of the engine: the same however they come, and never after their time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.serving.test_service import Counting, run
from trainyard.inference.config import GREEDY
from trainyard.inference.request import Completion, Request
from trainyard.inference.stop_words import StopWords
from trainyard.serving.config import DefaultsConfig, LimitConfig
from trainyard.serving.outputs import Output, Outputs, ServedModel, TextOptions
from trainyard.serving.service import EngineService, Piece
from trainyard.serving.text_stream import TextStream

WORDS = ("b", "ab", "ba\xe9", "\xe9")
END = 256


class Bytes:
    """A tokenizer whose tokens are bytes."""

    vocab_size = 257

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token % 256 for token in tokens if token != END).decode(errors="replace")


TOKENIZER: Any = Bytes()


def text_of(completion: Completion, words: Sequence[str], cuts: Sequence[int]) -> str:
    """Its text in pieces that begin at cuts."""
    request, tokens = completion.request, completion.tokens
    output = Output(request, TextStream(TOKENIZER.decode, request.prompt, stop_words=words))
    joined = ""
    for begin, end in pairwise(sorted({0, len(tokens), *cuts})):
        joined += output.add(
            Piece(
                tokens=tokens[begin:end],
                log_probs=[0.0] * (end - begin) if request.log_probs else [],
                top=[],
                finish_reason=completion.finish_reason if end == len(tokens) else None,
                prompt_log_probs=[],
                prompt_top=[],
            )
        )
    assert joined == output.text
    assert len(output.offsets) == len(output.log_probs)
    return joined


@settings(max_examples=30, deadline=None)
@given(
    st.text(st.sampled_from("ab\xe9"), min_size=1, max_size=30),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
    st.integers(0, 20),
    st.sets(st.integers(1, 59)),
    st.booleans(),
)
def test_a_text_is_cut_at_the_word_that_ended_it_however_it_comes(
    text: str, words: list[str], min_tokens: int, cuts: set[int], log_probs: bool
) -> None:
    """Whole as without streaming, token by token as streamed, and in pieces as to a slow reader."""
    stop = StopWords(TOKENIZER, words)
    data = text.encode()
    most = {"max_tokens": len(data), "min_tokens": min_tokens}
    completion = Completion(Request(prompt=[65], is_stop=stop, log_probs=log_probs, **most))
    for token in data:
        completion.append(token)
        if completion.is_done:
            break
    tokens = completion.tokens
    is_cut = completion.finish_reason == "stop"
    expected = stop.cut(tokens) if is_cut else TOKENIZER.decode(tokens)
    assert text_of(completion, words, []) == expected
    assert text_of(completion, words, range(len(tokens))) == expected
    assert text_of(completion, words, [cut for cut in cuts if cut < len(tokens)]) == expected


def test_what_a_reader_that_does_not_read_asked_for_ends_at_its_time() -> None:
    engine = Counting()
    engine.max_tokens = 10**9

    async def work(service: EngineService) -> None:
        served = ServedModel(
            name="counting",
            tokenizer=TOKENIZER,
            end_token=END,
            service=service,
            limits=LimitConfig(request_timeout_seconds=0.05),
            defaults=DefaultsConfig(),
        )
        options = TextOptions(max_tokens=10**8, sampling=GREEDY)
        outputs = Outputs(served, [[1], [2]], options)
        with pytest.raises(TimeoutError):  # noqa: PT012
            async for _ in outputs.steps():
                while service.num_open or service.stats.num_running:
                    await asyncio.sleep(0.001)

    run(engine, work)
    assert sorted(engine.cancelled) == [1, 2]
    assert not engine.has_work()
