"""The format of conversations that a tokenizer brings, as tokens of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainyard.errors import ConfigError
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.chat.templates import ChatTemplate, named_tokens, own_template

Messages = Sequence[Mapping[str, Any]]


class ChatFormat:
    """Lays conversations out: by the prompt format of an SFTTokenizer or MultimodalTokenizer, or by
    the chat template among the files of a HuggingFaceTokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for a tokenizer without a format."""
        self._tokenizer: Any = tokenizer
        self._template: ChatTemplate | None = None
        if hasattr(tokenizer, "tokenize_conversation"):
            return
        kind = tokenizer.config.tokenizer_type
        if kind != "HuggingFaceTokenizer":
            raise ConfigError(
                f"the checkpoint's tokenizer ({kind}) has no format of conversations; use "
                "/v1/completions"
            )
        files = tokenizer.files()
        self._special = named_tokens(files)
        self._template = own_template(files, "the checkpoint's tokenizer")

    def tokens(self, messages: Messages) -> list[int]:
        """A conversation, and what invites the model to answer it. Raises DataError for one that
        the format does not take."""
        if self._template is None:
            ids: list[int] = self._tokenizer.tokenize_conversation(
                messages, return_target=False, add_generation_prompt=True
            ).tolist()
            return ids
        text = self._template.render(messages, self._special, invite=True)
        found: list[int] = self._tokenizer.library.encode(text, add_special_tokens=False).ids
        return found
