"""SentencePiece models: the shared ones, and those that tests train, a kind of each."""

from __future__ import annotations

import io
from typing import Any

import sentencepiece

MODELS = {
    "llama2": "data/vocab/llama2/tokenizer.model",
    "stories": "data/checkpoints/stories260K/tok512.model",
    "albert": "data/vocab/sentencepiece/albert-spiece.model",
    "seqio": "data/vocab/sentencepiece/seqio-test.model",
    "spm": "data/vocab/sentencepiece/spm-test.model",
}
TRAINED: dict[str, dict[str, Any]] = {
    "plain": {"model_type": "bpe", "byte_fallback": True},
    "no prefix": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False},
    "symbols": {
        "model_type": "bpe",
        "byte_fallback": True,
        "user_defined_symbols": ["<|im_start|>", "###", "aa"],
        "control_symbols": ["<|ctrl|>"],
        "pad_id": 3,
    },
    "removes": {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": True},
    "no bytes": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram", "byte_fallback": True},
}
FAST = ("llama2", "plain", "no prefix", "symbols")
"""Those for which gigatoken encodes."""

BORDERS = (("ab", "a"), ("aba", "ba"), ("a", "b"), ("=", "-"), (" ", "x"), ("the ", "cat"))


COMMON = {
    "vocab_size": 420,
    "hard_vocab_limit": False,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "num_threads": 1,
    "minloglevel": 2,
}


def train(**options: Any) -> bytes:
    """A model of some pieces with runs and borders that merge in many ways."""
    lines = [f"{a}{b}  {a * n}{b}{a}\n" for a, b in BORDERS for n in range(1, 9)]
    lines += ["The cat   sat on 12 mats, \u4f60\u597d.\tna\u00efve == '----'" * 3] * 20
    sink = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=sink,
        **COMMON | options,
    )
    return sink.getvalue()
