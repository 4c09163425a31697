"""GPT2BPETokenizer: the byte-level BPE of GPT-2 from a local vocab.json and merges.txt.

As in Megatron-LM's type of this name, "<|endoftext|>" within a text becomes the id that ends a
document."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from trainyard.errors import ArtifactError, ConfigError
from trainyard.tokenizers.base import read_part
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.hf_tokenizers import NamingTokenizer

END_OF_TEXT = "<|endoftext|>"

SETTINGS = {
    "tokenizer_class": "GPT2Tokenizer",
    "add_prefix_space": False,
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "unk_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
}
"""The tokenizer_config.json with which transformers loads the files."""


def build_gpt2(config: TokenizerConfig) -> NamingTokenizer:
    """The tokenizer of `--vocab-file` and `--merge-file`."""
    assert config.vocab_file is not None
    assert config.merge_file is not None
    vocab_json = read_part("--vocab-file", config.vocab_file, "vocab.json")
    merges_txt = read_part("--merge-file", config.merge_file, "merges.txt")
    vocab = _parse_vocab(vocab_json, config.vocab_file)
    library = byte_level_library(
        vocab, _parse_merges(merges_txt, config.merge_file), config.merge_file
    )
    files = {
        "vocab.json": vocab_json,
        "merges.txt": merges_txt,
        "tokenizer_config.json": json.dumps(SETTINGS, indent=1).encode() + b"\n",
    }
    return NamingTokenizer(config, library, files, vocab[END_OF_TEXT], pad=None)


def byte_level_library(vocab: dict[str, int], merges: list[tuple[str, str]], name: str) -> Library:
    """GPT-2's splitting of text around a BPE of bytes."""
    try:
        library = Library(BPE(vocab, merges))
    except Exception as error:  # the library raises plain Exception
        raise ArtifactError(f"{name}: these merges do not fit the vocabulary: {error}") from None
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    library.decoder = ByteLevelDecoder()
    library.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return library


def _parse_vocab(data: bytes, url: str) -> dict[str, int]:
    try:
        vocab = json.loads(data)
    except UnicodeDecodeError as error:
        raise _not_text("--vocab-file", url, error) from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"--vocab-file {url}: not a JSON document: {error}") from None
    if not isinstance(vocab, dict) or not _are_ids(vocab.values()):
        raise ArtifactError(
            f"--vocab-file {url}: not a table of tokens and ids (whole numbers from 0)"
        )
    if END_OF_TEXT not in vocab:
        raise ConfigError(
            f"--vocab-file {url} has no {END_OF_TEXT}, which this type needs to end documents"
        )
    return vocab


def _are_ids(values: Collection[Any]) -> bool:
    if not set(map(type, values)) <= {int}:
        return False
    return min(values, default=0) >= 0 and max(values, default=0) < 2**32


def _not_text(flag: str, url: str, error: UnicodeDecodeError) -> ArtifactError:
    line = 1 + bytes(error.object[: error.start]).count(b"\n")
    return ArtifactError(
        f"{flag} {url}: byte {error.start}, on line {line}, is not UTF-8 text; is it the right "
        "file, and complete?"
    )


def _parse_merges(data: bytes, url: str) -> list[tuple[str, str]]:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _not_text("--merge-file", url, error) from None
    merges = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not left or not right or " " in right:
            raise ArtifactError(f"--merge-file {url}: line {number} is not two tokens: {line!r}")
        merges.append((left, right))
    return merges
