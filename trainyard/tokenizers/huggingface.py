"""HuggingFaceTokenizer: any `tokenizer.json`, without transformers and without a network.

As in Megatron-LM's type of this name, the special tokens that the tokenizer adds around a text,
such as a BOS, are added unless `--tokenizer-hf-no-include-special-tokens` is given. A special token
that is spelt out within a text becomes that token: raw text with "<|endoftext|>" yields the
end-of-document id. `--tokenizer-special-tokens` extend those that the tokenizer has."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as Library

from trainyard.artifacts import store
from trainyard.artifacts.inputs import read_checked
from trainyard.errors import ArtifactError, ConfigError
from trainyard.tokenizers.base import read_part
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.hf_tokenizers import (
    MODEL,
    SETTINGS,
    NamingTokenizer,
    named_token,
    parse_library,
    read_settings,
)

TEMPLATE = "chat_template.jinja"
CARRIED = (MODEL, *SETTINGS, TEMPLATE)
USUAL_ENDS = ("<|endoftext|>", "</s>")


def build_huggingface(config: TokenizerConfig) -> NamingTokenizer:
    """The tokenizer of `--tokenizer-model`: a folder, or a tokenizer.json without other files."""
    url = config.tokenizer_model
    assert url is not None
    files = _read_files(url)
    if config.chat_template:
        files[TEMPLATE] = read_part("--chat-template", config.chat_template, "Jinja file")
    library = parse_library(files[MODEL], url)
    settings = [read_settings(files[name], f"{url}: {name}") for name in SETTINGS if name in files]
    eod = _token_id(library, settings, "eos_token", url)
    if eod is None:
        eod = _usual_end(library, url)
    if config.tokenizer_special_tokens:
        del files[MODEL]  # `files()` writes one that has the added tokens
    around = not config.tokenizer_hf_no_include_special_tokens
    pad = _token_id(library, settings, "pad_token", url)
    return NamingTokenizer(config, library, files, eod, pad, around=around)


def _read_files(url: str) -> dict[str, bytes]:
    if store.exists(url):
        return {MODEL: read_checked(url)}
    if not store.exists(store.join(url, MODEL)):
        raise ArtifactError(
            f"--tokenizer-model: {url} is neither a tokenizer.json nor a folder with one; if it is "
            "a name on a hub, download the tokenizer and give its folder"
        )
    present = [name for name in CARRIED if store.exists(store.join(url, name))]
    return {name: read_checked(store.join(url, name)) for name in present}


def _token_id(library: Library, settings: list[dict[str, Any]], role: str, url: str) -> int | None:
    token = named_token(settings, role)
    if token is None:
        return None
    found: int | None = library.token_to_id(token)
    if found is None:
        raise ConfigError(f"--tokenizer-model {url}: its {role} {token!r} is not in its vocabulary")
    return found


def _usual_end(library: Library, url: str) -> int:
    for token in USUAL_ENDS:
        found: int | None = library.token_to_id(token)
        if found is not None:
            return found
    raise ConfigError(
        f"--tokenizer-model {url} does not name the token that ends a document, and has none of "
        f"{', '.join(USUAL_ENDS)}; name the eos_token in a tokenizer_config.json beside the "
        "tokenizer.json, and give the folder"
    )
