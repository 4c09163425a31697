"""The table of tokenizers, and the way back from the files that a checkpoint carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainyard.artifacts import store
from trainyard.errors import ArtifactError
from trainyard.tokenizers.base import DESCRIPTION, FORMAT_VERSION, Tokenizer
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.gpt2 import build_gpt2
from trainyard.tokenizers.huggingface import build_huggingface
from trainyard.tokenizers.null import NullTokenizer

TOKENIZERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "GPT2BPETokenizer": build_gpt2,
    "HuggingFaceTokenizer": build_huggingface,
    "NullTokenizer": NullTokenizer,
}
"""How each `--tokenizer-type` is built."""

CARRIED_AS = {
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    "HuggingFaceTokenizer": {"tokenizer_model": ""},
    "NullTokenizer": {},
}
"""The options that point a type at its carried files: option to file name, "" the folder itself."""


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that a configuration describes."""
    return TOKENIZERS[config.tokenizer_type](config)


def load_tokenizer(folder_url: str) -> Tokenizer:
    """The tokenizer whose `files()` lie in a folder."""
    url = store.join(folder_url, DESCRIPTION)
    document = store.read_json(url)
    kind = _check(document, url)
    places: dict[str, Any] = {
        option: store.join(folder_url, name) if name else folder_url
        for option, name in CARRIED_AS[kind].items()
    }
    sizes = {key: document[key] for key in ("vocab_size", "vocab_extra_ids") if key in document}
    return build_tokenizer(
        TokenizerConfig(tokenizer_type=document["tokenizer_type"], **places, **sizes)
    )


def _check(document: Any, url: str) -> str:
    if not isinstance(document, dict) or not isinstance(document.get("format_version"), int):
        raise ArtifactError(f"{url}: not the description of a tokenizer")
    if document["format_version"] > FORMAT_VERSION:
        raise ArtifactError(
            f"{url} has format_version {document['format_version']}, this program knows up to "
            f"{FORMAT_VERSION}: use a newer trainyard"
        )
    kind = document.get("tokenizer_type")
    if kind not in CARRIED_AS:
        raise ArtifactError(
            f"{url}: unknown tokenizer_type {kind!r}; known are {', '.join(TOKENIZERS)}"
        )
    return str(kind)
