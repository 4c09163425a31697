"""The options of the tokenizer that a checkpoint carries: which of its files is which. No library
that encodes, so that a flow can read them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from trainyard.artifacts import store
from trainyard.config import ROLE, leaves
from trainyard.errors import ArtifactError
from trainyard.stored_values import from_stored
from trainyard.tokenizers.config import TokenizerConfig

DESCRIPTION = "trainyard_tokenizer.json"
"""The file that names the tokenizer type of the files beside it."""

FORMAT_VERSION = 2
"""Version 1 had only the type, `vocab_size` and `vocab_extra_ids`."""

CARRIED_AS: dict[str, dict[str, str]] = {
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    "BertWordPieceLowerCase": {"vocab_file": "vocab.txt"},
    "BertWordPieceCase": {"vocab_file": "vocab.txt"},
    "HuggingFaceTokenizer": {"tokenizer_model": ""},
    "SentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "GPTSentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "Llama2Tokenizer": {"tokenizer_model": "tokenizer.model"},
    "TikTokenizer": {"tokenizer_model": "tiktoken.vocab"},
    "ByteLevelTokenizer": {},
    "NullTokenizer": {},
    "SFTTokenizer": {"tokenizer_model": ""},
    "MultimodalTokenizer": {"tokenizer_model": ""},
}
"""The file names in a checkpoint for each option of a type; "" is the folder itself."""

CHAT_TEMPLATE = "chat_template.jinja"
"""In the same folder if a template was given, or came with the tokenizer."""


def carried_options(folder_url: str) -> dict[str, Any]:
    """The options of the tokenizer of such a folder, by field name."""
    url = store.join(folder_url, DESCRIPTION)
    document = store.read_json(url)
    kind = _check(document, url)
    # The paths are those of this folder, never those in the file.
    known = {name for name, _, field in leaves(TokenizerConfig) if ROLE not in field.metadata}
    kept = {key: document[key] for key in known if key in document}
    options: dict[str, Any] = from_stored(kept, fields(TokenizerConfig))
    for option, name in CARRIED_AS[kind].items():
        options[option] = store.join(folder_url, name) if name else folder_url
    template = store.join(folder_url, CHAT_TEMPLATE)
    if store.exists(template):
        options["chat_template"] = template
    return options


def _check(document: Any, url: str) -> str:
    if not isinstance(document, dict) or not isinstance(document.get("format_version"), int):
        raise ArtifactError(f"{url}: not the description of a tokenizer")
    if document["format_version"] > FORMAT_VERSION:
        raise ArtifactError(
            f"{url} has format_version {document['format_version']}, but this program reads only "
            f"up to {FORMAT_VERSION}; use a newer trainyard"
        )
    kind = document.get("tokenizer_type")
    if kind not in CARRIED_AS:
        raise ArtifactError(
            f"{url}: unknown tokenizer_type {kind!r}; known are {', '.join(CARRIED_AS)}"
        )
    return str(kind)
