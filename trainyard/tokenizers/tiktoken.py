"""TikTokenizer: a byte-level BPE by ranks, from Megatron-LM's JSON or a .tiktoken file.

The first `--tiktoken-num-special-tokens` ids are special tokens: `--tokenizer-special-tokens`, or
`SPECIAL`, then <SPECIAL_N> for the rest. The ranks follow, up to `--vocab-size` ids in all (131072
unless the file has fewer). </s> ends a document. A special token that is spelt out in a text
becomes its id, as in Megatron-LM's newest tokenizer."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray

from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.tokenizers.base import (
    Flat,
    as_lists,
    description,
    join_rows,
    read_part,
)
from trainyard.tokenizers.carried import DESCRIPTION
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.fast.gigatoken import Gigatoken, gigatoken_for_ranks
from trainyard.tokenizers.fast.probe import overlap
from trainyard.tokenizers.fast.seams import encode_in_parts, letter_seam

VOCAB = "tiktoken.vocab"
USUAL_SIZE = 131072
NEEDED = ("<unk>", "<s>", "</s>")
SPECIAL = (*NEEDED, "<mask>", "<pad>", "<cls>", "<sep>")
FILLER = "<SPECIAL_{}>"
NUM_BYTES = 256

LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]"
SPACES = r"\s+(?!\S)|\s+"
PATTERNS = {
    "v1": rf"{BEFORE}?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{SPACES}",
    "v2": rf"{BEFORE}?{UPPER}*{LOWER}+|{BEFORE}?{UPPER}+{LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{SPACES}",
}
"""The patterns that split text into words; they determine ids, so they equal Megatron-LM's."""

SCHEMES = {"v2": "nemotron"}
"""gigatoken's names for the patterns that it supports."""


class TikTokenizer:
    """Wraps a `tiktoken.Encoding` in our protocol; gigatoken encodes if it makes the same ids.

    bos, eos, unk, cls, sep, mask: ids of special tokens, None if it has none."""

    def __init__(
        self, config: TokenizerConfig, ranks: list[bytes], special: Sequence[str], data: bytes
    ) -> None:
        self.config = config
        self._data = data
        self._num_special, self._num_ranks = len(special), len(ranks)
        self.vocab_size = len(special) + len(ranks)
        pattern = config.tiktoken_pattern or "v2"
        ids = {token: i for i, token in enumerate(special)}
        self._library = tiktoken.Encoding(
            name="trainyard",
            pat_str=PATTERNS[pattern],
            mergeable_ranks={token: len(special) + i for i, token in enumerate(ranks)},
            special_tokens=ids,
        )
        self.unk, self.bos, self.eos = (ids[token] for token in NEEDED)
        self.mask, self.pad, self.cls, self.sep = map(ids.get, SPECIAL[len(NEEDED) :])
        self.eod = self.eos
        self._seam = letter_seam(special)
        self._gigatoken: Gigatoken | None = None
        # The libraries may differ in which of two overlapping tokens they find first.
        mixed = any(overlap(a, b) for a, b in combinations(config.tokenizer_special_tokens, 2))
        if config.use_gigatoken and pattern in SCHEMES and not mixed:
            above = {token: len(ranks) + i for token, i in ids.items()}
            self._gigatoken = gigatoken_for_ranks(
                ranks, above, SCHEMES[pattern], self._rotated, self._seam
            )

    @property
    def releases_gil(self) -> bool:
        """Of the two engines, gigatoken keeps it."""
        return self._gigatoken is None

    @property
    def engine(self) -> str:
        """Name and version of the library that encodes."""
        return self._gigatoken.name if self._gigatoken else f"tiktoken {tiktoken.__version__}"

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        if self._gigatoken is None:
            return self.encode_reference(text)
        total, shift = self.vocab_size, self._num_special
        return [(i + shift) % total for i in self._gigatoken.encode(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, in order."""
        return as_lists(self.encode_flat(texts))

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The ids of several texts as arrays."""
        if self._gigatoken is None:
            return join_rows([self.reference_array(text) for text in texts])
        ids, bounds = self._gigatoken.encode_flat(texts)
        # gigatoken's ids begin with the ranks, ours with the special tokens.
        ids = ids + ids.dtype.type(self._num_special)
        ids[ids >= self.vocab_size] -= ids.dtype.type(self.vocab_size)
        return ids, bounds

    def encode_reference(self, text: str) -> list[int]:
        """The ids of a text by the tiktoken library."""
        try:
            return self._library.encode(text, allowed_special="all")
        except ValueError as error:
            raise DataError(
                f"the tiktoken library cannot encode a text of {len(text)} characters ({error}); "
                f"it begins {text[:40]!a}"
            ) from None

    def reference_array(self, text: str) -> NDArray[np.uint32]:
        """The same as an array; a long text in parts."""
        return encode_in_parts(text, self._seam, self.encode_reference)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included; broken UTF-8 becomes U+FFFD."""
        return self._library.decode(list(ids))

    def files(self) -> dict[str, bytes]:
        """The ranks and the description."""
        return {VOCAB: self._data, DESCRIPTION: description(self.config)}

    def _rotated(self, texts: Sequence[str]) -> list[Any]:
        """The ids of the reference in gigatoken's numbering."""
        total, shift = self.vocab_size, self._num_special
        rows = (self.reference_array(text).astype(np.int64) for text in texts)
        return [((row - shift) % total).astype(np.uint32) for row in rows]


def build_tiktoken(config: TokenizerConfig) -> TikTokenizer:
    """The tokenizer of `--tokenizer-model`."""
    url = config.tokenizer_model
    assert url is not None
    data = read_part("--tokenizer-model", url, "vocabulary")
    special = special_tokens(config)
    try:
        ranks = parse_json(data) if data.lstrip()[:1] == b"[" else parse_lines(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"--tokenizer-model {url}: {error}") from None
    size = config.vocab_size or min(USUAL_SIZE, len(special) + len(ranks))
    if not len(special) + NUM_BYTES <= size <= len(special) + len(ranks):
        raise ConfigError(
            f"--vocab-size must be {len(special) + NUM_BYTES} to {len(special) + len(ranks)} with "
            f"{len(special)} special tokens (--tiktoken-num-special-tokens) and the {len(ranks)} "
            f"tokens of {url}, got {size}"
        )
    ranks = ranks[: size - len(special)]
    if len({token for token in ranks if len(token) == 1}) < NUM_BYTES:
        raise ArtifactError(
            f"--tokenizer-model {url}: its first {len(ranks)} tokens must include every byte, but "
            "do not"
        )
    return TikTokenizer(config, ranks, special, data)


def special_tokens(config: TokenizerConfig) -> list[str]:
    """Every special token in the order of its id."""
    count = config.tiktoken_num_special_tokens
    named = list(config.tokenizer_special_tokens or SPECIAL)
    tokens = named + [FILLER.format(i) for i in range(len(named), count)]
    if len(named) > count:
        raise ConfigError(
            f"--tiktoken-num-special-tokens must be at least {len(named)}, for "
            f"{', '.join(named)}, got {count}"
        )
    if not set(NEEDED) <= set(named):
        raise ConfigError(f"--tokenizer-special-tokens must include {', '.join(NEEDED)}")
    if len(set(tokens)) < len(tokens) or "" in tokens:
        raise ConfigError(
            "--tokenizer-special-tokens must be distinct, not empty, and not of the form "
            f"{FILLER.format(len(named))}"
        )
    return tokens


def parse_json(data: bytes) -> list[bytes]:
    """Tokens in the order of their ranks, from Megatron-LM's list of objects."""
    tokens = []
    for rank, entry in enumerate(json.loads(data)):
        if not isinstance(entry, dict) or entry.get("rank") != rank:
            raise ValueError(f"entry {rank} is not an object whose rank is {rank}")
        tokens.append(_token(entry.get("token_bytes"), f"entry {rank}"))
    return _unique(tokens)


def parse_lines(data: bytes) -> list[bytes]:
    """Tokens in the order of their ranks, from lines of a token in base64 and its rank."""
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        parts = line.split()
        if len(parts) != 2 or not parts[1].isdigit():
            raise ValueError(f"line {number} is not a token in base64 and its rank: {line[:40]!r}")
        rank = int(parts[1])
        if rank in tokens:
            raise ValueError(f"line {number}: rank {rank} comes twice")
        tokens[rank] = _token(parts[0], f"line {number}")
    if not tokens:
        raise ValueError("it has no tokens")
    if max(tokens) != len(tokens) - 1:
        missing = next(rank for rank in range(len(tokens)) if rank not in tokens)
        raise ValueError(f"its ranks must be 0 to {len(tokens) - 1}, but {missing} is missing")
    return _unique([tokens[rank] for rank in range(len(tokens))])


def _token(value: Any, where: str) -> bytes:
    try:
        token = b64decode(value, validate=True)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: not a token in base64: {str(value)[:40]!r}") from None
    if not token:
        raise ValueError(f"{where}: an empty token")
    return token


def _unique(tokens: list[bytes]) -> list[bytes]:
    if len(set(tokens)) < len(tokens):
        raise ValueError("a token comes twice")
    return tokens
