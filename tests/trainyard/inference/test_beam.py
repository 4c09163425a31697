"""Beam search: wide enough it is exhaustive, one beam is greedy, and lengths are penalised."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.trainyard.inference.small_models import (
    build,
    decoder_of,
    full_logits,
    greedy_by_training,
    some_prompts,
)
from trainyard.inference.beam import BeamText, Finished, beam_search
from trainyard.inference.decoders import CachedDecoder
from trainyard.models.gpt.model import GPTModel

WORDS, END, LENGTH = 4, 3, 3


def search(model: GPTModel, width: int, penalty: float = 1.0, words: int = 64) -> list[BeamText]:
    (prompt,) = some_prompts(6)
    decoder = CachedDecoder(model, width, len(prompt) + LENGTH, vocab_size=words)
    return beam_search(decoder, prompt, LENGTH, width=width, length_penalty=penalty, end=END)


@pytest.mark.parametrize(("kind", "penalty"), [("llama", 0.0), ("llama", 1.5), ("hybrid", 1.5)])
def test_a_search_wide_enough_finds_the_best_of_all_texts(kind: str, penalty: float) -> None:
    model = build(kind)
    assert isinstance(model, GPTModel)
    (prompt,) = some_prompts(6)
    scores = {}
    for text in product(range(WORDS), repeat=LENGTH):
        kept = text[: text.index(END) + 1] if END in text else text
        logits = full_logits(model, prompt, kept)[:-1, :WORDS]
        log_probs = logits.log_softmax(-1)[range(len(kept)), list(kept)]
        scores[kept] = float(log_probs.double().sum()) / len(kept) ** penalty
    ranked = sorted(scores, key=lambda text: -scores[text])
    found = search(model, WORDS**LENGTH, penalty, WORDS)
    assert [tuple(text.tokens) for text in found[:10]] == ranked[:10]
    for text in found:
        assert text.score == pytest.approx(scores[tuple(text.tokens)], rel=1e-4)


@pytest.mark.parametrize("kind", ["gpt", "hybrid", "t5"])
def test_one_beam_is_greedy(kind: str) -> None:
    model, (prompt,) = build(kind), some_prompts(7)
    (found,) = beam_search(decoder_of(model, [prompt], 8), prompt, 8, width=1)
    assert found.tokens == greedy_by_training(model, prompt, 8)


def test_the_search_ends_when_no_beam_can_win() -> None:
    finished = Finished(2, 1.0)
    finished.add([1], -1.0, 1)
    assert not finished.beats(-100.0, 2)
    finished.add([2, 3], -4.0, 2)
    assert finished.beats(-6.0, 3)
    assert not finished.beats(-5.9, 3)
    finished.add([4], -1.5, 1)
    assert [text.tokens for text in finished.texts] == [[1], [4]]


def test_rows_of_a_cache_are_reordered() -> None:
    model = build("llama")
    prompts = some_prompts(5, 9)
    decoder = decoder_of(model, prompts, 4)
    with torch.no_grad():
        decoder.start(prompts)
        decoder.reorder([1, 1])
        logits = decoder.step(torch.tensor([7, 7]))
    expected = full_logits(model, prompts[1], [7])[-1]
    torch.testing.assert_close(logits, expected.expand(2, -1), rtol=1e-4, atol=1e-5)
