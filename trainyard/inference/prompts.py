"""The prompts of a run, from the command line or a file, each with what it says about itself, and
their tokens. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainyard import json_text
from trainyard.artifacts.inputs import read_checked
from trainyard.errors import ConfigError, DataError
from trainyard.tokenizers.base import Tokenizer

NEIGHBORS = "neighbors"
"""Key of a line: for each chunk of the prompt a list of the texts of its neighbours, for a
Retro."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue."""

    text: str
    name: str
    """For messages: its place."""
    neighbors: tuple[tuple[str, ...], ...] | None = None
    """For each chunk of the text, the texts of its neighbours; None: the line has none."""


def read_prompts(
    texts: Sequence[str], url: str | None, key: str, form: str | None = None
) -> list[Prompt]:
    """The given texts, or all prompts of a file, in order. DataError names a line that holds none.

    key: of the prompt in a line of a .jsonl file; a dot leads into an object, as in prompt.text.
    form: jsonl or txt; None: as the name of the file ends."""
    if url is None:
        return [Prompt(text, f"prompt {i}") for i, text in enumerate(texts)]
    try:
        lines = read_checked(url).decode().split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{url}: not UTF-8: {error}") from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"{url}: holds no prompt; write one on each line")
    if form == "txt" or (form is None and url.endswith(".txt")):
        return [Prompt(line.rstrip("\r"), f"{url}, line {i},") for i, line in numbered]
    return [_from_line(line, f"{url}, line {i},", key) for i, line in numbered]


def _from_line(line: str, name: str, key: str) -> Prompt:
    try:
        document: Any = json_text.loads(line)
    except ValueError as error:
        raise DataError(f"{name} {error}") from None
    text = _value(document, key)
    if not isinstance(text, str):
        raise DataError(
            f"{name} is no object with a text in {key!r}; name the key of prompts with --prompt-key"
        )
    neighbors = document.get(NEIGHBORS)
    if neighbors is None:
        return Prompt(text, name)
    if not isinstance(neighbors, list) or not all(
        isinstance(chunk, list) and all(isinstance(one, str) for one in chunk)
        for chunk in neighbors
    ):
        raise DataError(f"{name} {NEIGHBORS!r} must be a list of texts for each chunk")
    return Prompt(text, name, tuple(tuple(chunk) for chunk in neighbors))


def _value(document: Any, key: str) -> Any:
    """What an object has under a key, or on the way through objects that dots describe."""
    for name in (key,) if isinstance(document, dict) and key in document else key.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document


def prompt_tokens(tokenizer: Tokenizer, text: str, *, add_bos: bool = False) -> list[int]:
    """A prompt as tokens. An empty one is the token that begins or ends documents."""
    bos = getattr(tokenizer, "bos", None)
    first = tokenizer.eod if bos is None else int(bos)
    tokens = tokenizer.encode(text)
    if not tokens or (add_bos and tokens[0] != first):
        return [first, *tokens]
    return tokens


def chat_tokens(tokenizer: Any, text: str) -> list[int]:
    """A conversation of one user's turn, and what invites the model to answer it."""
    lay_out = getattr(tokenizer, "tokenize_conversation", None)
    if lay_out is None:
        raise ConfigError(
            f"--chat: the checkpoint's tokenizer ({tokenizer.config.tokenizer_type}) has no format "
            "of conversations, so the model was not tuned on any; leave it out"
        )
    turns = [{"role": "user", "content": text}]
    ids: list[int] = lay_out(turns, return_target=False, add_generation_prompt=True).tolist()
    return ids
