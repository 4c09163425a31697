"""LAMBADA's protocols by hand, and what is right under a model that repeats."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.trainyard.evaluation.models import byte_tokenizer, repeating_model
from trainyard.errors import DataError
from trainyard.evaluation.config import EvaluationConfig, LambadaProtocol
from trainyard.evaluation.continuations import Continuations
from trainyard.evaluation.lambada import open_passages, split_passage
from trainyard.evaluation.scoring import Scorer


@pytest.mark.parametrize(
    ("protocol", "text", "context", "label"),
    [
        ("megatron", "he said hi", "he said h", "i"),
        ("megatron-strict", "he said hi", "he said", " hi"),
        ("megatron-strict", "hi he said hi\n", "hi he said", " hi"),  # the last occurrence
        ("megatron-strict", "it is isis", "it is", " isis"),
        ("lm-eval", "he said hi", "he said", " hi"),
        ("lm-eval", "he said  hi", "he said", "  hi"),  # spaces belong to the label
        ("lm-eval", "he said\nhi", "he", " said\nhi"),  # words end at spaces alone
        ("lm-eval", "hi", "", " hi"),
    ],
)
def test_context_and_label_of_each_protocol(
    protocol: LambadaProtocol, text: str, context: str, label: str
) -> None:
    tokenizer = byte_tokenizer()
    found = split_passage(text, protocol, Continuations.of(tokenizer))
    assert tuple(map(tokenizer.decode, found)) == (context, label)


def test_a_passage_is_right_if_every_token_of_its_label_is_the_likeliest(tmp_path: Path) -> None:
    tokenizer, model = byte_tokenizer(), repeating_model(seq_length=16)
    file = tmp_path / "lambada.jsonl"
    texts = ["aaaa aa", "aaaa  ", "xxxxxxxxxxxxxxxxxxxxxxxxxxxx    "]
    file.write_text("".join(json.dumps({"text": f"{text}b"}) + "\n" for text in texts))
    file.write_text(file.read_text() + json.dumps({"text": "abbb"}) + "\n")
    config = EvaluationConfig(task="LAMBADA")
    passages = open_passages(str(file), config, Scorer(model), tokenizer)
    rows = passages.score(range(len(passages)))
    # The model repeats each token: a label is right where it equals the token before it.
    assert [row["is_right"] for row in rows] == [0, 0, 0, 1]
    numbers = passages.summarize(rows).numbers
    assert (numbers["num_correct"], numbers["num_examples"], numbers["accuracy"]) == (1, 4, 0.25)
    assert numbers["num_cut_contexts"] == 1
    mean = sum(row["loss"] for row in rows) / 4
    assert numbers["target_ppl"] == pytest.approx(math.exp(min(20, mean)))
    assert passages.line("LAMBADA", numbers) == (
        " validation results on LAMBADA | number correct: 1.0000E+00 | total examples: 4.0000E+00 "
        "| avg accuracy: 2.5000E-01"
    )
    strict = EvaluationConfig(task="LAMBADA", strict_lambada=True)
    assert open_passages(str(file), strict, Scorer(model), tokenizer).protocol.digest != (
        passages.protocol.digest
    )


def test_lines_without_a_passage_are_refused(tmp_path: Path) -> None:
    file, config = tmp_path / "l.jsonl", EvaluationConfig(task="LAMBADA", strict_lambada=True)
    scorer = Scorer(repeating_model(seq_length=8))
    for line, message in (
        ('{"txt": "a"}', r"l\.jsonl: line 1 .*: no string under 'text'"),
        ('{"text": " "}', r"l\.jsonl: line 1 .*: the passage has no words"),
        ('{"text": "a bbbbbbbbbb"}', r"has 11 tokens, and a window has 8"),
    ):
        file.write_text(line + "\n")
        with pytest.raises(DataError, match=message):
            open_passages(str(file), config, scorer, byte_tokenizer())


def test_a_score_is_the_log_softmax_of_the_logits() -> None:
    tokenizer, model = byte_tokenizer(), repeating_model(seq_length=16)
    continuations = Continuations.of(tokenizer)
    request, _ = continuations.fitted(*continuations.behind("abc", "de"), 16)
    (score,) = Scorer(model).score([request])
    logits = model(torch.tensor([request.tokens[:-1]]))[0].log_softmax(-1)
    expected = -sum(logits[-2 + i, token].item() for i, token in enumerate(request.tokens[-2:]))
    assert score.loss == pytest.approx(expected, rel=1e-5)
