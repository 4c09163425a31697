"""HuggingFaceTokenizer: any `tokenizer.json`, without transformers and without a network.

As with Megatron's type of this name, special tokens that the tokenizer puts around a text (a BOS,
say) are put, and a special token that is spelt out within a text becomes that token: raw text that
contains "<|endoftext|>" yields the end-of-document id."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Engine

from trainyard.artifacts import store
from trainyard.errors import ArtifactError, ConfigError
from trainyard.tokenizers.base import DESCRIPTION, check_vocab_size, description
from trainyard.tokenizers.config import TokenizerConfig

MODEL = "tokenizer.json"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that name the special tokens, in the order in which they are asked."""

CARRIED = (MODEL, *SETTINGS, "chat_template.jinja")
USUAL_ENDS = ("<|endoftext|>", "</s>")


class EngineTokenizer:
    """A tokenizer of the Hugging Face `tokenizers` library behind our protocol."""

    def __init__(
        self,
        config: TokenizerConfig,
        engine: Engine,
        files: dict[str, bytes],
        eod: int,
        pad: int | None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.eod = eod
        self.pad = pad
        self.vocab_size = count_ids(engine)
        self._files = files
        engine.no_truncation()  # a file may carry the limits of some model; documents are not cut
        engine.no_padding()
        check_vocab_size(config, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self.engine.encode(text).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, in order."""
        return [encoding.ids for encoding in self.engine.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""
        text: str = self.engine.decode(list(ids), skip_special_tokens=False)
        return text

    def files(self) -> dict[str, bytes]:
        """What `load_tokenizer` needs; transformers loads the folder as well."""
        return self._files | {DESCRIPTION: description(self.config)}


def build_huggingface(config: TokenizerConfig) -> EngineTokenizer:
    """The tokenizer of `--tokenizer-model`: a folder, or a tokenizer.json and nothing beside it."""
    url = config.tokenizer_model
    assert url is not None
    files = _read_files(url)
    engine = parse_engine(files[MODEL], url)
    settings = [_settings(files[name], f"{url}: {name}") for name in SETTINGS if name in files]
    eod = _token_id(engine, settings, "eos_token", url)
    if eod is None:
        eod = _usual_end(engine, url)
    return EngineTokenizer(
        config, engine, files, eod, _token_id(engine, settings, "pad_token", url)
    )


def count_ids(engine: Engine) -> int:
    """One above the highest id, which ids left out make more than the number of tokens."""
    vocab: dict[str, int] = engine.get_vocab(with_added_tokens=True)
    return max(len(vocab), 1 + max(vocab.values(), default=-1))


def parse_engine(data: bytes, name: str) -> Engine:
    """A tokenizer.json; ArtifactError when it is not one."""
    try:
        return Engine.from_str(data.decode())
    except Exception as error:  # the library raises plain Exception
        raise ArtifactError(f"{name}: not a tokenizer.json that can be read: {error}") from None


def _read_files(url: str) -> dict[str, bytes]:
    if store.exists(url):
        return {MODEL: store.read_bytes(url)}
    if not store.exists(store.join(url, MODEL)):
        raise ArtifactError(
            f"--tokenizer-model: {url} is neither a tokenizer.json nor a folder with one (names on "
            "a hub are not looked up: download the tokenizer and give its folder)"
        )
    present = [name for name in CARRIED if store.exists(store.join(url, name))]
    return {name: store.read_bytes(store.join(url, name)) for name in present}


def _settings(data: bytes, name: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise ArtifactError(f"{name} is not a JSON document: {error}") from None
    return document if isinstance(document, dict) else {}


def _token_id(engine: Engine, settings: list[dict[str, Any]], role: str, url: str) -> int | None:
    for document in settings:
        token = document.get(role)
        if isinstance(token, dict):  # an AddedToken written out
            token = token.get("content")
        if isinstance(token, str):
            found: int | None = engine.token_to_id(token)
            if found is None:
                raise ConfigError(
                    f"--tokenizer-model {url}: its {role} {token!r} is not in its vocabulary"
                )
            return found
    return None


def _usual_end(engine: Engine, url: str) -> int:
    for token in USUAL_ENDS:
        found: int | None = engine.token_to_id(token)
        if found is not None:
            return found
    raise ConfigError(
        f"--tokenizer-model {url} does not say which token ends a document and has none of "
        f"{', '.join(USUAL_ENDS)}: put the eos_token into a tokenizer_config.json beside the "
        "tokenizer.json, and give the folder"
    )
