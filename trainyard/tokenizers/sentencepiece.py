"""SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer: a SentencePiece .model.

All three make the same ids as the library's own `encode`, without a BOS. A document ends with the
end-of-sentence piece, as in Megatron-LM's newest tokenizers.

With `--vocab-extra-ids` or `--tokenizer-sentencepiece-legacy`, SentencePieceTokenizer is the one of
Megatron-LM up to 0.15 (and its T5). Then <CLS>, <SEP>, <EOD>, <MASK> and missing tokens for
padding, begin and end get ids above those of the model, followed by <extra_id_N>. Each becomes its
id where a text spells it out, and <EOD> ends a document. `--tokenizer-special-tokens` (legacy only)
replaces these tokens.

A text for a unigram model is never cut into parts, because the choice of pieces depends on all of
it: the library needs up to 40 bytes for each byte of the text."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from trainyard.errors import ConfigError
from trainyard.tokenizers.base import (
    Flat,
    Ids,
    as_lists,
    check_vocab_size,
    description,
    encode_apart,
    join_rows,
    read_part,
)
from trainyard.tokenizers.carried import DESCRIPTION
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.fast.sentencepiece_engine import Pieces, any_of
from trainyard.tokenizers.fast.sentencepiece_model import SPACE

MODEL = "tokenizer.model"
CLASS, SEPARATOR, END, MASK = STANDARD = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")
EXTRA_SPACE = "\u262f"
"""Megatron-LM's mark for a space that the model would drop; few vocabularies have it."""

LONG_LETTERS = 1 << 16
"""A part of at least this many characters is encoded as an array."""

Encode = Callable[[str], Ids]


class SentencePieceTokenizer:
    """Wraps `Pieces` in our protocol, and adds special tokens if configured.

    bos, eos, cls, sep, mask: ids of special tokens, None if it has none."""

    def __init__(self, config: TokenizerConfig, data: bytes, url: str) -> None:
        self.config = config
        self._data = data
        self._pieces = Pieces(data, url, config.use_gigatoken)
        library = self._pieces.library
        num_pieces: int = library.get_piece_size()
        self._special, extra = special_tokens(config, self._pieces)
        self._names = {i: token for token, i in self._special.items()}
        self._cut = any_of(self._special)
        self.vocab_size = max([num_pieces, *(i + 1 for i in self._names)])
        check_vocab_size(config, self.vocab_size)
        self.cls, self.sep, end, self.mask = map(self._special.get, STANDARD)
        self.extra_ids = tuple(self._special[token] for token in extra)
        self.bos = _known(library.bos_id(), self._special.get("<BOS>"))
        self.eos = _known(library.eos_id(), self._special.get("<EOS>"))
        self.pad = _known(library.pad_id(), self._special.get("<PAD>"))
        self._end = end
        self._keep_spaces = keeps_spaces(config, self._pieces)

    @property
    def eod(self) -> int:
        """Id that ends a document; ConfigError if the model has none."""
        return _end_of_document(self._end, self.eos, self.config)

    @property
    def releases_gil(self) -> bool:
        """Whether two threads of one process can encode at the same time."""
        return self._pieces.releases_gil

    @property
    def engine(self) -> str:
        """Name and version of the library that encodes."""
        return self._pieces.engine

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._encode(text, self._encode_part).tolist()

    def encode_reference(self, text: str) -> list[int]:
        """The ids of a text by the sentencepiece library alone."""
        return self._encode(text, self._reference_part).tolist()

    def reference_array(self, text: str) -> NDArray[np.uint32]:
        """The same as an array."""
        if self._keep_spaces or (self._cut and self._cut.search(text)):
            return _as_array(self._encode(text, self._reference_part))
        return self._pieces.reference_array(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, in order."""
        return as_lists(self.encode_flat(texts))

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The ids of several texts as arrays."""
        if self._keep_spaces:
            return join_rows([self._encode_array(text) for text in texts])
        if self._cut is None:
            return self._pieces.encode_flat(texts)
        return encode_apart(texts, self._cut.search, self._encode_array, self._pieces.encode_flat)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; an added special token is followed by a space."""
        parts: list[str] = []
        rest: list[int] = []
        for i in ids:
            if i in self._names:
                parts += [self._pieces.library.decode(rest), self._names[i]]
                rest = []
            else:
                rest.append(i)
        text = " ".join([*parts, self._pieces.library.decode(rest)])
        return text.strip() if self._trims else text

    def files(self) -> dict[str, bytes]:
        """The model and the description."""
        return {MODEL: self._data, DESCRIPTION: description(self.config)}

    @cached_property
    def begins_word(self) -> NDArray[np.bool_]:
        """(vocab_size,) whether a token begins a word: pieces that begin with a space do."""
        library = self._pieces.library
        begins = np.ones(self.vocab_size, np.bool_)
        pieces = (library.id_to_piece(i) for i in range(library.get_piece_size()))
        begins[: library.get_piece_size()] = [piece.startswith(SPACE) for piece in pieces]
        return begins

    @property
    def _trims(self) -> bool:
        """Whether to drop a space after a special token, as Megatron-LM's newer tokenizer does for
        chat templates."""
        return bool(self.config.tokenizer_special_tokens)

    def _encode_array(self, text: str) -> NDArray[np.uint32]:
        return _as_array(self._encode(text, self._encode_part))

    def _encode_part(self, part: str) -> Ids:
        if len(part) < LONG_LETTERS:
            return self._pieces.encode(part)
        return self._pieces.encode_flat([part])[0]

    def _reference_part(self, part: str) -> Ids:
        if len(part) < LONG_LETTERS:
            return self._pieces.by_library([part])[0]
        return self._pieces.reference_array(part)

    def _encode(self, text: str, encode: Encode) -> array[int]:
        """The ids of a text, each part by `encode`. An array: a list would be ten times as
        large."""
        ids = array("I")
        if self._keep_spaces:
            text = mark_spaces(text)
        place = 0
        for found in self._cut.finditer(text) if self._cut else ():
            part = encode(text[place : found.start()]) if found.start() > place else []
            if self._trims and ids and ids[-1] in self._names and list(part[:1]) == [self._space]:
                part = part[1:]
            _extend(ids, part)
            ids.append(self._special[found[0]])
            place = found.end()
        rest = text[place:]
        for part in marked_ids(rest, encode) if self._keep_spaces else [encode(rest)]:
            _extend(ids, part)
        return ids

    @cached_property
    def _space(self) -> int:
        found: int = self._pieces.library.piece_to_id(SPACE)
        return found


def build_sentencepiece(config: TokenizerConfig) -> SentencePieceTokenizer:
    """The tokenizer of `--tokenizer-model`."""
    url = config.tokenizer_model
    assert url is not None
    if config.tokenizer_special_tokens and not _is_legacy(config):
        raise ConfigError(
            "--tokenizer-special-tokens: the special tokens of a SentencePiece model are fixed in "
            "training; to add some, give --tokenizer-type SentencePieceTokenizer and "
            "--tokenizer-sentencepiece-legacy"
        )
    data = read_part("--tokenizer-model", url, "SentencePiece model")
    return SentencePieceTokenizer(config, data, url)


def special_tokens(config: TokenizerConfig, pieces: Pieces) -> tuple[dict[str, int], list[str]]:
    """Special tokens, at which a text is split, with their ids; and those that are sentinels.

    A token that the model lacks gets an id above the model's."""
    extra = [f"<extra_id_{k}>" for k in range(config.num_extra_ids)]
    names: Iterable[str] = config.tokenizer_special_tokens
    if not names and (extra or _is_legacy(config)):
        names = [*STANDARD, *_roles(pieces.library)]
    ids: dict[str, int] = {}
    following: int = pieces.library.get_piece_size()
    for name in dict.fromkeys([*names, *extra]):
        if not name:
            raise ConfigError("--tokenizer-special-tokens: one of them is empty")
        found = pieces.find(name)
        ids[name] = following if found is None else found
        following += found is None
    return ids, extra


def keeps_spaces(config: TokenizerConfig, pieces: Pieces) -> bool:
    """Whether to keep spaces that the model would drop."""
    if config.tokenizer_sentencepiece_ignore_extra_whitespaces:
        return False
    two, one = pieces.by_library(["x  y", "x y"])
    return two == one


def mark_spaces(text: str) -> str:
    """A text with a mark at each place where a space would be dropped."""
    marked = re.sub(r"(?<= )(?= )|^ | $", f" {EXTRA_SPACE} ", text)
    return marked.rstrip()


def marked_ids(text: str, encode: Encode) -> Iterator[Ids]:
    """The ids of a marked text, without those of the marks, from mark to mark."""
    for part in re.finditer(f"[^{EXTRA_SPACE}]+", text):
        yield encode(part[0] + EXTRA_SPACE)[:-1]


def _extend(ids: array[int], part: Ids) -> None:
    if isinstance(part, np.ndarray):
        ids.frombytes(part.astype(np.uintc, copy=False).tobytes())
    else:
        ids.extend(part)


def _as_array(ids: array[int]) -> NDArray[np.uint32]:
    return np.frombuffer(ids, np.uintc).astype(np.uint32, copy=False)


def _is_legacy(config: TokenizerConfig) -> bool:
    named = config.tokenizer_type == "SentencePieceTokenizer"
    return named and config.tokenizer_sentencepiece_legacy


def _roles(library: sentencepiece.SentencePieceProcessor) -> list[str]:
    """Pieces for padding, begin and end; <PAD>, <BOS> and <EOS> for those that the model lacks."""
    ids = {"<PAD>": library.pad_id(), "<BOS>": library.bos_id(), "<EOS>": library.eos_id()}
    return [library.id_to_piece(i) if i >= 0 else name for name, i in ids.items()]


def _known(of_model: int, added: int | None) -> int | None:
    return of_model if of_model >= 0 else added


def _end_of_document(end: int | None, eos: int | None, config: TokenizerConfig) -> int:
    found = eos if end is None else end
    if found is None:
        advice = (
            "give --tokenizer-type SentencePieceTokenizer and --tokenizer-sentencepiece-legacy, "
            f"which add {END}"
        )
        if _is_legacy(config):
            advice = f"add {END} to --tokenizer-special-tokens, or leave that option out"
        raise ConfigError(
            f"--tokenizer-model {config.tokenizer_model} has no end-of-sentence piece to end "
            f"documents with; {advice}"
        )
    return found
