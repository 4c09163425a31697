"""SFTTokenizer: conversations to tokens, and to the targets that say which of them are learnt.

Text alone it encodes and decodes as the Hugging Face tokenizer does that it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ConfigError, DataError
from trainyard.tokenizers.base import Flat
from trainyard.tokenizers.chat.prompt_formats import (
    SFT_FORMATS,
    PromptFormat,
    find_format,
    render_turns,
)
from trainyard.tokenizers.chat.templates import named_tokens, own_template
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.hf_tokenizers import ROLES, EngineTokenizer
from trainyard.tokenizers.huggingface import TEMPLATE, build_huggingface

IGNORED = -100
"""The target of a token that is not learnt."""

Ids = NDArray[np.int64]
Message = Mapping[str, Any]


class ConversationTokenizer:
    """A Hugging Face tokenizer with a prompt format.

    masked_roles: whose turns are not learnt; those of the assistant are, and no role is unknown."""

    masked_roles: tuple[str, ...] = ("system", "user")

    def __init__(self, inner: EngineTokenizer, prompt_format: PromptFormat, flag: str) -> None:
        self._inner = inner
        self._prompt_format = prompt_format
        files = inner.files()
        self.special_tokens = named_tokens(files)
        self._template = None
        if prompt_format.layout is None:
            self._template = own_template(
                files, f"--tokenizer-model {inner.config.tokenizer_model}"
            )
        elif inner.config.chat_template:
            raise ConfigError(
                f"--chat-template is for formats without one of their own, not {flag}"
            )
        ids = (self._id_of(self.special_tokens.get(f"{role}_token")) for role in ROLES)
        self.bos, self.eos, self.unk, self.cls, self.sep, self.mask = ids
        if prompt_format.begins and self.bos is None:
            raise ConfigError(
                f"{flag} begins with the BOS token, and --tokenizer-model "
                f"{inner.config.tokenizer_model} names none: put a bos_token into its "
                "tokenizer_config.json"
            )
        self.pad = self._find_pad()

    # --- as the tokenizer that it is made of ---

    @property
    def config(self) -> TokenizerConfig:
        """The options it was built from."""
        return self._inner.config

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return self._inner.vocab_size

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        return self._inner.eod

    @property
    def engine(self) -> str:
        """Name and version of the library that encodes."""
        return self._inner.engine

    @property
    def releases_gil(self) -> bool:
        """Whether two threads of one process encode side by side."""
        return self._inner.releases_gil

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._inner.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, in order."""
        return self._inner.encode_batch(texts)

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The ids of several texts as arrays."""
        return self._inner.encode_flat(texts)

    def encode_reference(self, text: str) -> list[int]:
        """The ids of a text by the tokenizers library."""
        return self._inner.encode_reference(text)

    def reference_array(self, text: str) -> NDArray[np.uint32]:
        """The same as an array."""
        return self._inner.reference_array(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""
        return self._inner.decode(ids)

    def files(self) -> dict[str, bytes]:
        """What `load_tokenizer` needs; a chat template only if it is used."""
        files = self._inner.files()
        if self._template is None:
            files.pop(TEMPLATE, None)
        return files

    # --- conversations ---

    @overload
    def tokenize_conversation(
        self,
        conversation: Sequence[Message],
        return_target: Literal[True] = True,
        add_generation_prompt: bool = False,
    ) -> tuple[Ids, Ids]: ...

    @overload
    def tokenize_conversation(
        self,
        conversation: Sequence[Message],
        return_target: Literal[False],
        add_generation_prompt: bool = False,
    ) -> Ids: ...

    def tokenize_conversation(
        self,
        conversation: Sequence[Message],
        return_target: bool = True,
        add_generation_prompt: bool = False,
    ) -> Ids | tuple[Ids, Ids]:
        """The tokens of a conversation, and for each of them itself or -100 where it is not to be
        learnt. DataError names a turn that cannot be separated from its neighbours."""
        turns = self.prepare(conversation)
        text = self.render(turns, invite=add_generation_prompt)
        tokens = self._tokens(text)
        if not return_target:
            return tokens
        targets = tokens.copy()
        if self._prompt_format.masks:
            self._mask(turns, tokens, targets)
        return tokens, targets

    def prepare(self, conversation: Sequence[Message]) -> list[Message]:
        """The turns that are laid out."""
        for number, turn in enumerate(conversation):
            if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
                raise DataError(f"turn {number} is not an object with a role")
            if self._prompt_format.masks and not isinstance(turn.get("content"), str):
                raise DataError(f"turn {number} ({turn['role']}): its content is not a string")
        turns = list(conversation)
        if not self._prompt_format.system and turns and turns[0]["role"] == "system":
            del turns[0]
        if not turns:
            raise DataError("a conversation without turns")
        return turns

    def render(self, turns: Sequence[Message], *, invite: bool = False) -> str:
        """The text of prepared turns."""
        if self._template is not None:
            return self._template.render(turns, self.special_tokens, invite=invite)
        return render_turns(
            self._prompt_format,
            [(turn["role"], turn["content"]) for turn in turns],
            bos=self.special_tokens.get("bos_token", ""),
            eos=self.special_tokens.get("eos_token", ""),
            invite=invite,
        )

    def check_turn(self, turns: Sequence[Message], number: int) -> None:
        """Refuse a turn that nothing can be learnt from."""

    def _mask(self, turns: Sequence[Message], tokens: Ids, targets: Ids) -> None:
        place = 0
        for number, turn in enumerate(turns):
            role = turn["role"].lower()
            if role not in (*self.masked_roles, "assistant"):
                known = ", ".join((*self.masked_roles, "assistant"))
                raise DataError(f"turn {number} has the role {turn['role']!r}; known are {known}")
            self.check_turn(turns, number)
            alone = self._tokens(self.render([turn]))
            if self._prompt_format.begins and number > 0:
                alone = alone[1:]  # there is one BOS, before the first turn
            end = place + len(alone)
            if not np.array_equal(tokens[place:end], alone):
                raise DataError(
                    f"turn {number} ({role}) gives other tokens alone than within its "
                    f"conversation, so its targets are not known; it begins "
                    f"{turn['content'][:40]!r}"
                )
            masked = len(alone) if role in self.masked_roles else self._prompt_format.masked_prefix
            targets[place : place + masked] = IGNORED
            place = end
        if place != len(tokens):
            raise DataError(
                f"the turns of a conversation give {place} tokens alone and {len(tokens)} "
                "together, so their targets are not known"
            )

    def _tokens(self, text: str) -> Ids:
        return np.array(self._inner.library.encode(text, add_special_tokens=False).ids, np.int64)

    def _id_of(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self._inner.library.token_to_id(token)
        return found

    def _find_pad(self) -> int | None:
        name = self._prompt_format.pad
        if name == "pad_token":
            found = self._id_of(self.special_tokens.get(name))
            return self.eos if found is None and not self._prompt_format.masks else found
        found = self._id_of(self.special_tokens.get(name, name))
        # What a tokenizer does not have is its unknown token.
        return self.unk if found is None else found


class SFTTokenizer(ConversationTokenizer):
    """Conversations for supervised fine-tuning."""

    masked_roles = ("system", "user", "tool")

    def check_turn(self, turns: Sequence[Message], number: int) -> None:
        """Refuse a turn of the assistant that there is nothing to learn from."""
        role = turns[number]["role"].lower()
        if role != "assistant":
            return
        if not turns[number]["content"]:
            raise DataError(f"turn {number} ({role}) is empty")
        before = turns[number - 1]["role"].lower() if number else "nothing"
        if before not in ("user", "tool"):
            raise DataError(f"turn {number} ({role}) comes after {before}, not after user or tool")


def build_sft(config: TokenizerConfig) -> SFTTokenizer:
    """The tokenizer of `--tokenizer-model` in the format of `--sft-tokenizer-prompt-format`."""
    flag, name = "--sft-tokenizer-prompt-format", config.sft_tokenizer_prompt_format
    prompt_format = find_format(SFT_FORMATS, name, flag)
    return SFTTokenizer(build_huggingface(config), prompt_format, f"{flag} {name}")
