"""What every tokenizer offers, and the file that lets one be rebuilt from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from trainyard.artifacts import store
from trainyard.errors import ArtifactError, ConfigError
from trainyard.tokenizers.config import TokenizerConfig

DESCRIPTION = "trainyard_tokenizer.json"
"""The file that says which kind the files beside it make up."""

FORMAT_VERSION = 1


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def config(self) -> TokenizerConfig:
        """What it was built from."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included, before any padding of the embedding."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    @property
    def pad(self) -> int | None:
        """Id that fills a row, where there is one."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, in order."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""

    def files(self) -> dict[str, bytes]:
        """Name and contents of every file that `load_tokenizer` needs to build the same again."""


def description(config: TokenizerConfig) -> bytes:
    """Contents of the file `DESCRIPTION`: no paths, so that it is the same wherever it was made."""
    document = {
        "format_version": FORMAT_VERSION,
        "tokenizer_type": config.tokenizer_type,
        "vocab_size": config.vocab_size,
        "vocab_extra_ids": config.vocab_extra_ids,
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def check_vocab_size(config: TokenizerConfig, found: int) -> None:
    """Refuse a `--vocab-size` that is not the one the files have."""
    if config.vocab_size not in (None, found):
        raise ConfigError(
            f"--vocab-size {config.vocab_size}, but {config.tokenizer_type} has {found} ids; "
            "leave the option out"
        )


def read_part(flag: str, url: str, what: str) -> bytes:
    """A file that an option names; a missing one is told by the option."""
    if not store.exists(url):
        raise ArtifactError(f"{flag}: there is no {what} at {url}; give the path or URL of a file")
    return store.read_bytes(url)
