"""The WordPiece tokenizer of an encoder: the given vocabulary, or the one beside its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainyard import json_text
from trainyard.artifacts import store
from trainyard.artifacts.inputs import read_checked
from trainyard.artifacts.urls import join
from trainyard.checkpoint.load import open_checkpoint
from trainyard.embedding.encoder import Encoder
from trainyard.errors import ConfigError
from trainyard.tokenizers.config import TokenizerConfig, TokenizerType
from trainyard.tokenizers.wordpiece import WordPieceTokenizer, build_wordpiece

VOCABULARY, LIBRARY, SETTINGS = "vocab.txt", "tokenizer.json", "tokenizer_config.json"
"""Files of a tokenizer's folder."""

MOST_BESIDES = 1024
"""Rows of an embedding beyond the vocabulary: padding to a multiple, and sentinels of T5."""

GIVE_ONE = "give --retro-bert-vocab-file and --retro-bert-tokenizer-type"


def find_tokenizer(
    encoder: Encoder, given: TokenizerConfig | None, scratch: Path
) -> WordPieceTokenizer:
    """The tokenizer for an encoder. scratch: a folder for a vocabulary that is a part of a file.

    Raises ConfigError if there is none, or if its vocabulary is not the encoder's."""
    if given is None:
        given = _of_folder(_folder_of(encoder), scratch)
    tokenizer = build_wordpiece(given, extra=())
    count = tokenizer.vocab_size
    if not 0 <= encoder.vocab_size - count < MOST_BESIDES:
        raise ConfigError(
            f"{given.vocab_file} has {count:,} tokens, and the encoder {encoder.url} "
            f"{encoder.vocab_size:,}; give the vocabulary that it was trained with "
            "(--retro-bert-vocab-file)"
        )
    return tokenizer


def _folder_of(encoder: Encoder) -> str:
    """The folder of the tokenizer that an encoder brings."""
    if encoder.kind == "hf":
        return encoder.url
    if encoder.kind != "trainyard":
        raise ConfigError(f"--load {encoder.url} brings no tokenizer; {GIVE_ONE}")
    with open_checkpoint(encoder.url) as checkpoint:
        checkpoint.require_tokenizer()
        return checkpoint.tokenizer_url


def _of_folder(url: str, scratch: Path) -> TokenizerConfig:
    """The tokenizer of a folder, as transformers and our checkpoints lay it out."""
    present = store.list_folder(url)
    settings = _document(url, SETTINGS) if SETTINGS in present else {}
    if VOCABULARY in present:
        return _config(join(url, VOCABULARY), settings, url, SETTINGS)
    if LIBRARY not in present:
        raise ConfigError(f"--load {url} has neither {VOCABULARY} nor {LIBRARY}; {GIVE_ONE}")
    library = _document(url, LIBRARY)
    model, normalizer = library.get("model") or {}, library.get("normalizer") or {}
    if model.get("type") != "WordPiece":
        raise ConfigError(
            f"--load {url}: the model of its {LIBRARY} is {model.get('type')!r}, not WordPiece; "
            "embed by a program of your own (--embedder), or name another encoder"
        )
    vocabulary = model["vocab"]
    path = scratch / VOCABULARY
    path.write_text("".join(f"{t}\n" for t in sorted(vocabulary, key=vocabulary.__getitem__)))
    names = {"lowercase": "do_lower_case", "handle_chinese_chars": "tokenize_chinese_chars"}
    as_settings = {names.get(key, key): value for key, value in normalizer.items()}
    return _config(str(path), as_settings, url, LIBRARY)


def _document(url: str, name: str) -> dict[str, Any]:
    found: Any = json_text.loads(read_checked(join(url, name)))
    return found if isinstance(found, dict) else {}


def _config(vocab_file: str, settings: dict[str, Any], url: str, name: str) -> TokenizerConfig:
    """settings: as in tokenizer_config.json; those of BERT where it has none."""
    lower = settings.get("do_lower_case", True)
    usual = {"strip_accents": (None, lower), "tokenize_chinese_chars": (None, True)}
    for key, values in usual.items():
        if settings.get(key) not in values:
            raise ConfigError(
                f"--load {url}: {key} is {settings[key]!r} in its {name}, which no type of ours "
                "does; embed by a program of your own (--embedder)"
            )
    kind: TokenizerType = "BertWordPieceLowerCase" if lower else "BertWordPieceCase"
    return TokenizerConfig(tokenizer_type=kind, vocab_file=vocab_file)
