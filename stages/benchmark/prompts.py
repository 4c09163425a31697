"""Prompts of a benchmark: given ones, turns of users, or random tokens."""

from __future__ import annotations

from trainyard.errors import ConfigError
from trainyard.tokenizers.base import Tokenizer


def ordinary_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that a random prompt may have: all but those that end or fill documents."""
    special = {tokenizer.eod, tokenizer.pad}
    ordinary = [i for i in range(tokenizer.vocab_size) if i not in special]
    if not ordinary:
        raise ConfigError("--num-input-tokens: the tokenizer has only special tokens")
    return ordinary
