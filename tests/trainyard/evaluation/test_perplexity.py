"""Overlapping windows against one target at a time, and the numbers that follow."""

from __future__ import annotations

import math

import pytest
import torch

from trainyard.errors import ConfigError, DataError
from trainyard.evaluation.config import EvaluationConfig
from trainyard.evaluation.perplexity import check_text, summarize, windows
from trainyard.evaluation.scoring import Request, Scorer
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters

LENGTH = 12
CUTS = [(40, 12, 4), (41, 12, 5), (40, 12, 12), (13, 12, 4), (14, 12, 4), (5, 12, 4), (60, 12, 1)]


def small_model() -> GPTModel:
    config = GPTConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        seq_length=LENGTH,
        init_method_std=0.3,
    )
    model = GPTModel(config, 50)
    init_parameters(model, 2)
    return model.eval()


def total_loss(
    model: GPTModel, tokens: list[int], *, length: int, stride: int, batch_size: int
) -> float:
    cut = windows(len(tokens), length, stride)
    requests = [Request(tokens[w.start : w.start + w.num_targets + 1], w.num_scored) for w in cut]
    return sum(score.loss for score in Scorer(model, batch_size=batch_size).score(requests))


@pytest.mark.parametrize(("num_tokens", "length", "stride"), CUTS)
def test_every_target_is_scored_exactly_once(num_tokens: int, length: int, stride: int) -> None:
    scored = []
    for window in windows(num_tokens, length, stride):
        assert window.num_targets <= length
        end = window.start + window.num_targets
        scored += range(end - window.num_scored + 1, end + 1)
    assert scored == list(range(1, num_tokens))


@pytest.mark.parametrize(("num_tokens", "length", "stride"), CUTS)
def test_the_loss_equals_that_of_one_target_at_a_time(
    num_tokens: int, length: int, stride: int
) -> None:
    model = small_model()
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 50, (num_tokens,), generator=generator).tolist()
    expected = 0.0
    for target in range(1, num_tokens):
        window = max(0, math.ceil((target - length) / stride))
        context = torch.tensor([tokens[window * stride : target]])
        with torch.no_grad():
            expected -= model(context)[0, -1].log_softmax(-1)[tokens[target]].item()
    measured = total_loss(model, tokens, length=length, stride=stride, batch_size=3)
    assert measured == pytest.approx(expected, rel=1e-5)


def test_batch_size_changes_nothing_but_speed() -> None:
    model, tokens = small_model(), list(range(45))
    one, many = (
        total_loss(model, tokens, length=LENGTH, stride=4, batch_size=size) for size in (1, 7)
    )
    assert one == pytest.approx(many, rel=1e-6)


def test_adjusted_perplexity_counts_words_of_the_file() -> None:
    numbers = summarize(loss_sum=300.0, num_tokens=101, num_words=51, num_bytes=400).numbers
    assert numbers["avg_loss"] == 3.0
    assert numbers["ppl"] == pytest.approx(math.exp(3.0))
    assert numbers["token_ratio"] == 2.0
    assert numbers["adjusted_ppl"] == pytest.approx(math.exp(6.0))
    assert numbers["bits_per_byte"] == pytest.approx(300 / math.log(2) / 400)


def test_the_perplexity_of_a_huge_loss_is_bounded() -> None:
    numbers = summarize(loss_sum=5000.0, num_tokens=101, num_words=51, num_bytes=400).numbers
    assert numbers["ppl"] == numbers["adjusted_ppl"] == math.exp(20.0)


def test_a_file_without_text_is_refused() -> None:
    assert check_text("one two three", 3, "a.txt") == 3
    with pytest.raises(DataError, match=r"a\.txt: 1 words and 0 tokens"):
        check_text("\n", 0, "a.txt")


def test_windows_longer_than_the_model_supports_are_refused() -> None:
    assert EvaluationConfig(task="WIKITEXT103").window(128, 128) == 128
    with pytest.raises(ConfigError, match="--seq-length 256 is longer than the 128 positions"):
        EvaluationConfig(task="WIKITEXT103", seq_length=256).window(128, 128)
    with pytest.raises(ConfigError, match="--overlapping-eval 32 is longer than a window of 16"):
        EvaluationConfig(task="WIKITEXT103").window(16, 16)
    with pytest.raises(ConfigError, match="--overlapping-eval must be at least 1"):
        EvaluationConfig(task="WIKITEXT103", overlapping_eval=0)
