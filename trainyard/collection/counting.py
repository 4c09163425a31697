"""Counts the size of a text: in tokens of a tokenizer, words or bytes.

The tokenizer is built once a process; its package is imported only then."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from trainyard.collection.options import Count
from trainyard.tokenizers.config import TokenizerConfig


@cache
def token_counter(config: TokenizerConfig | None) -> Callable[[str], int] | None:
    """What counts tokens; None without a tokenizer."""
    if config is None:
        return None
    from trainyard.tokenizers.registry import build_tokenizer

    tokenizer = build_tokenizer(config)
    return lambda text: len(tokenizer.encode_flat([text])[0])


def counter_of(count: Count, tokenizer: TokenizerConfig | None) -> Callable[[str], int]:
    """What measures a text."""
    if count == "words":
        return lambda text: len(text.split())
    if count == "bytes":
        return lambda text: len(text.encode(errors="surrogatepass"))
    tokens = token_counter(tokenizer)
    assert tokens is not None
    return tokens
