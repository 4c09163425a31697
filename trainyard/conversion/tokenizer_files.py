"""The tokenizer of a converted folder, as files of a trainyard checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.errors import TrainyardError
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_fitting, build_tokenizer, load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Carried:
    """A tokenizer as files; no files without a tokenizer."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """By their names in tokenizer/."""
    vocab_size: int | None = None


NONE = Carried()


def carried(config: TokenizerConfig, rows: int | None = None) -> Carried:
    """The tokenizer of a configuration, for a model with this many rows if they are known."""
    tokenizer = build_tokenizer(config) if rows is None else build_fitting(config, rows)
    return Carried(tokenizer.files(), tokenizer.vocab_size)


def find_tokenizer(url: str) -> Carried:
    """The tokenizer of a folder, found by the names of its files. Skips, with a warning, one that
    cannot be read."""
    config = _config_of(url, set(store.list_folder(url)))
    if config is None:
        return NONE
    try:
        return carried(config)
    except TrainyardError as error:
        log.warning("skipping the tokenizer of %s: %s", url, error)
        return NONE


def _config_of(url: str, present: set[str]) -> TokenizerConfig | None:
    if "tokenizer.json" in present:
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=url)
    if "tokenizer.model" in present:
        model = join(url, "tokenizer.model")
        return TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=model)
    if {"vocab.json", "merges.txt"} <= present:
        return TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=join(url, "vocab.json"),
            merge_file=join(url, "merges.txt"),
        )
    return None


def tokenizer_of(files: Mapping[str, bytes]) -> Tokenizer:
    """Load a tokenizer from its files."""
    with TemporaryDirectory(prefix="trainyard-tokenizer-") as folder:
        for name, data in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return load_tokenizer(folder)
