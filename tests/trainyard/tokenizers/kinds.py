"""The tokenizers of the shared vocabularies, each with the reference it must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from trainyard.artifacts import store
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer, load_tokenizer

OPTIONS: dict[str, dict[str, str]] = {
    "gpt2": {
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": "gpt2/vocab.json",
        "merge_file": "gpt2/merges.txt",
    },
    "neox": {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": "hf/gpt-neox-tokenizer.json",
    },
    "llama": {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": "hf/llama-tokenizer.json",
    },
    "bert-uncased": {
        "tokenizer_type": "BertWordPieceLowerCase",
        "vocab_file": "bert/bert-base-uncased-vocab.txt",
    },
    "bert-cased": {
        "tokenizer_type": "BertWordPieceCase",
        "vocab_file": "bert/bert-base-cased-vocab.txt",
    },
    "bert-chinese": {
        "tokenizer_type": "BertWordPieceLowerCase",
        "vocab_file": "bert/bert-base-chinese-vocab.txt",
    },
}

FAST = ("gpt2", "neox", "llama")
"""Those for which gigatoken encodes."""


def options(shared: Path, kind: str) -> dict[str, Any]:
    """The options of one of `OPTIONS`, its paths whole."""
    vocab = shared / "data/vocab"
    return {k: v if k == "tokenizer_type" else str(vocab / v) for k, v in OPTIONS[kind].items()}


def build(shared: Path, kind: str, **more: Any) -> Tokenizer:
    """One of `OPTIONS`, built."""
    return build_tokenizer(TokenizerConfig(**options(shared, kind), **more))


def huggingface(model: Path | str, **more: Any) -> Tokenizer:
    """A tokenizer.json or its folder, built."""
    config = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(model), **more
    )
    return build_tokenizer(config)


def carried(tokenizer: Tokenizer, folder: Path | str) -> Tokenizer:
    """The tokenizer that its own files make."""
    for name, data in tokenizer.files().items():
        store.write_bytes(store.join(str(folder), name), data)
    return load_tokenizer(str(folder))


def reference(shared: Path, kind: str) -> Callable[[Sequence[str]], list[list[int]]]:
    """What makes the ids that it must make, without a line of ours."""
    if kind == "gpt2":
        files = options(shared, kind)
        engine = tokenizers.ByteLevelBPETokenizer(files["vocab_file"], files["merge_file"])
        engine.add_special_tokens(["<|endoftext|>"])
    elif kind in ("neox", "llama"):
        engine = tokenizers.Tokenizer.from_file(options(shared, kind)["tokenizer_model"])
    else:
        engine = tokenizers.BertWordPieceTokenizer(
            options(shared, kind)["vocab_file"], lowercase=kind != "bert-cased"
        )
        if kind == "bert-cased":
            engine.add_special_tokens([f"<extra_id_{i}>" for i in range(100)])
    around = not kind.startswith("bert")

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in engine.encode_batch(list(texts), add_special_tokens=around)]

    return encode
