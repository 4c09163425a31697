"""The table of tokenizers, and how to load one from the files in a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing import parent_process

from trainyard.artifacts import store
from trainyard.config import from_dict
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.carried import carried_options
from trainyard.tokenizers.config import TokenizerConfig

log = logging.getLogger(__name__)

# Each library is imported when a tokenizer of its kind is built.


def _gpt2(config: TokenizerConfig) -> Tokenizer:
    from trainyard.tokenizers.gpt2 import build_gpt2

    return build_gpt2(config)


def _wordpiece(config: TokenizerConfig) -> Tokenizer:
    from trainyard.tokenizers.wordpiece import build_wordpiece

    return build_wordpiece(config)


def _huggingface(config: TokenizerConfig) -> Tokenizer:
    from trainyard.tokenizers.huggingface import build_huggingface

    return build_huggingface(config)


def _sentencepiece(config: TokenizerConfig) -> Tokenizer:
    from trainyard.tokenizers.sentencepiece import build_sentencepiece

    return build_sentencepiece(config)


def _tiktoken(config: TokenizerConfig) -> Tokenizer:
    from trainyard.tokenizers.tiktoken import build_tiktoken

    return build_tiktoken(config)


def _bytelevel(config: TokenizerConfig) -> Tokenizer:
    from trainyard.tokenizers.bytelevel import ByteLevelTokenizer

    return ByteLevelTokenizer(config)


def _null(config: TokenizerConfig) -> Tokenizer:
    from trainyard.tokenizers.null import NullTokenizer

    return NullTokenizer(config)


def _sft(config: TokenizerConfig) -> Tokenizer:
    from trainyard.tokenizers.chat.sft import build_sft

    return build_sft(config)


def _multimodal(config: TokenizerConfig) -> Tokenizer:
    from trainyard.tokenizers.chat.multimodal import build_multimodal

    return build_multimodal(config)


TOKENIZERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "GPT2BPETokenizer": _gpt2,
    "BertWordPieceLowerCase": _wordpiece,
    "BertWordPieceCase": _wordpiece,
    "HuggingFaceTokenizer": _huggingface,
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
    "Llama2Tokenizer": _sentencepiece,
    "TikTokenizer": _tiktoken,
    "ByteLevelTokenizer": _bytelevel,
    "NullTokenizer": _null,
    "SFTTokenizer": _sft,
    "MultimodalTokenizer": _multimodal,
}
"""How each `--tokenizer-type` is built."""

OF_FOLDER = "tokenizer.json"
"""The file that makes a folder a tokenizer."""


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that a configuration describes."""
    if config.legacy_tokenizer and parent_process() is None:  # not again in every worker
        _warn_legacy()
    return TOKENIZERS[config.tokenizer_type](config)


def build_fitting(config: TokenizerConfig, rows: int) -> Tokenizer:
    """The tokenizer for a model with this many rows. The extra ids that its type has by default are
    left out if there are rows only for the other tokens, as in models of Megatron-LM's releases."""
    tokenizer = build_tokenizer(config)
    usual = config.num_extra_ids if config.vocab_extra_ids is None else 0
    if not usual or not tokenizer.vocab_size - usual <= rows < tokenizer.vocab_size:
        return tokenizer
    log.info(
        "the model has rows for %d tokens: %s without its %d extra ids, as with "
        "--vocab-extra-ids 0",
        *(rows, config.tokenizer_type, usual),
    )
    return build_tokenizer(replace(config, vocab_extra_ids=0))


@cache
def _warn_legacy() -> None:
    log.warning(
        "--legacy-tokenizer is ignored. Files that Megatron-LM made before 0.15, or with that "
        "option, may differ in the BOS before a text, the end of a document and special tokens "
        "within a text (see docs/corpus.md)"
    )


def check_files(config: TokenizerConfig) -> None:
    """Raise the error of a missing file. Does not build the tokenizer if all files exist."""
    named = config.inputs()
    if not all(store.exists(url) or store.exists(store.join(url, OF_FOLDER)) for url in named):
        build_tokenizer(config)  # the error names the missing file


def load_tokenizer(folder_url: str) -> Tokenizer:
    """The tokenizer of a folder with the files that `Tokenizer.files` returned."""
    return build_tokenizer(from_dict(TokenizerConfig, carried_options(folder_url)))
