"""How many tokens the tokenizer of a Megatron-LM run knows, as far as its `args` tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ONE_MORE = ("NullTokenizer", "NullMultimodalTokenizer")
"""Tokenizers that add an end of document to --vocab-size, up to core 0.15."""

EXACT = ("TikTokenizer",)
"""Tokenizers that have as many tokens as --vocab-size says."""


def tokens_of(args: Mapping[str, Any], padded: int) -> int:
    """Tokens where the arguments say so: `true_vocab_size` of converters, `vocab_size` of the run;
    else the rows of the embedding, which are `padded`.

    Of other kinds of tokenizers the arguments keep the path of their files, which lie elsewhere."""
    for name in ("true_vocab_size", "vocab_size"):
        value = args.get(name)
        if type(value) is not int:
            continue
        if name == "vocab_size" and args.get("tokenizer_type") in ONE_MORE:
            value = min(value + 1, padded)  # where it is not one more, a row is spare
        if 0 < value <= padded:
            return value
    return padded
