"""SFTTokenizer: conversations to tokens, and to targets that mask what is not learnt.

It encodes and decodes plain text like the Hugging Face tokenizer that it wraps."""

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

    masked_roles: roles whose turns are not learnt; the only other role is the assistant's."""

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
                f"--chat-template does not apply to {flag}, which has a layout; leave it out"
            )
        ids = (self._id_of(self.special_tokens.get(f"{role}_token")) for role in ROLES)
        self.bos, self.eos, self.unk, self.cls, self.sep, self.mask = ids
        if prompt_format.begins and self.bos is None:
            raise ConfigError(
                f"{flag} begins with the BOS token, but --tokenizer-model "
                f"{inner.config.tokenizer_model} names none; put a bos_token into its "
                "tokenizer_config.json"
            )
        self.pad = self._find_pad()

    # --- as the wrapped tokenizer ---

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
        """Whether two threads of one process can encode at the same time."""
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
        """The files that `load_tokenizer` needs; a chat template only if it is used."""
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
        answers_only: bool | None = None,
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
        answers_only: bool | None = None,
    ) -> Ids | tuple[Ids, Ids]:
        """The tokens of a conversation and, for each, its target: the token, or -100 if it is not
        learnt. DataError names a turn that cannot be separated from its neighbours.

        answers_only: only the assistant's turns are learnt; unset: as in Megatron-LM, where format
        `default` masks nothing."""
        turns = self.prepare(conversation)
        text = self.render(turns, invite=add_generation_prompt)
        tokens = self._tokens(text)
        if not return_target:
            return tokens
        targets = tokens.copy()
        if self._prompt_format.masks and answers_only is not False:
            self._mask(turns, tokens, targets)
        elif answers_only:
            targets[~self._answers(turns, text)] = IGNORED
        return tokens, targets

    def prepare(self, conversation: Sequence[Message]) -> list[Message]:
        """The turns to lay out."""
        for number, turn in enumerate(conversation):
            if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
                raise DataError(f"turn {number} is not an object with a role")
            if self._prompt_format.masks and not isinstance(turn.get("content"), str):
                raise DataError(f"turn {number} ({turn['role']}): its content is not a string")
        turns = list(conversation)
        if not self._prompt_format.system and turns and turns[0]["role"] == "system":
            del turns[0]
        if not turns:
            raise DataError("the conversation has no turns")
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
        """Hook for subclasses: refuse a turn that nothing can be learnt from."""

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
                alone = alone[1:]  # in the conversation, only the first turn has a BOS
            end = place + len(alone)
            if not np.array_equal(tokens[place:end], alone):
                raise DataError(
                    f"turn {number} ({role}) tokenizes differently on its own than inside the "
                    f"conversation, so its loss mask is unknown; it begins {turn['content'][:40]!r}"
                )
            masked = len(alone) if role in self.masked_roles else self._prompt_format.masked_prefix
            targets[place : place + masked] = IGNORED
            place = end
        if place != len(tokens):
            raise DataError(
                f"the turns of a conversation have {place} tokens alone but {len(tokens)} "
                "together, so their loss mask is unknown"
            )

    def _answers(self, turns: Sequence[Message], text: str) -> NDArray[np.bool_]:
        """Which tokens of a conversation in a chat template are learnt: those of the assistant's
        turns behind the template's invitation. DataError if the template changes earlier turns."""
        encoding = self._inner.library.encode(text, add_special_tokens=False)
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        learnt = np.zeros(len(begins), np.bool_)
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            before = self.render(turns[:number], invite=True) if number else ""
            behind = self.render(turns[: number + 1])
            if not text.startswith(behind) or not behind.startswith(before):
                raise DataError(
                    f"turn {number} (assistant): the chat template lays out the turns before it "
                    "differently when more follow, so its loss mask is unknown; give another "
                    "--chat-template, or --no-answer-loss-only to learn every token"
                )
            learnt |= (begins >= len(before)) & (ends <= len(behind)) & (begins < ends)
        return learnt

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
        # A missing pad is the unknown token.
        return self.unk if found is None else found


class SFTTokenizer(ConversationTokenizer):
    """Conversations for supervised fine-tuning."""

    masked_roles = ("system", "user", "tool")

    def check_turn(self, turns: Sequence[Message], number: int) -> None:
        """Refuse a turn of the assistant that is empty or answers nothing."""
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
