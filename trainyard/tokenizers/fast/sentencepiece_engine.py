"""Encodes for a SentencePiece model: by gigatoken if it makes the same ids, else by the library."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from trainyard.errors import ArtifactError
from trainyard.tokenizers.base import Flat, check_unicode, encode_apart, flatten
from trainyard.tokenizers.fast.gigatoken import Gigatoken, gigatoken_for_pieces
from trainyard.tokenizers.fast.seams import SPACE_OR_DIGIT_SEAM, SPACE_SEAM, is_long, parts
from trainyard.tokenizers.fast.sentencepiece_model import (
    USER_DEFINED,
    has_lone_digits,
    is_cuttable,
    parse_pieces,
)


class Pieces:
    """Encodes for a model: by gigatoken if it makes the same ids, else by the library."""

    def __init__(self, data: bytes, url: str, use_gigatoken: bool) -> None:
        try:
            self.library = sentencepiece.SentencePieceProcessor()
            self.library.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise ArtifactError(
                f"--tokenizer-model {url}: not a SentencePiece model: {error}"
            ) from None
        model = parse_pieces(data, f"--tokenizer-model {url}")
        # SentencePiece splits a text at these first; gigatoken does it in another way.
        self._apart = any_of(model.pieces_of(USER_DEFINED))
        self._cuttable = is_cuttable(model)
        self._seam = SPACE_OR_DIGIT_SEAM if has_lone_digits(model) else SPACE_SEAM
        self._prefix = model.prefix
        self._gigatoken: Gigatoken | None = None
        if use_gigatoken:
            self._gigatoken = gigatoken_for_pieces(model, self.by_library, self._apart)

    @property
    def releases_gil(self) -> bool:
        """Of the two engines, gigatoken keeps it."""
        return self._gigatoken is None

    @property
    def engine(self) -> str:
        """Name and version of the library that encodes."""
        if self._gigatoken:
            return self._gigatoken.name
        return f"sentencepiece {sentencepiece.__version__}"

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        if self._gigatoken is None or (self._apart and self._apart.search(text)):
            return self.by_library([text])[0]
        return self._gigatoken.encode(text)

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The ids of several texts as arrays."""
        if not self._cuttable:
            return self._encode_flat(texts)
        return encode_apart(
            texts, is_long, lambda text: self._in_parts(text, self.encode), self._encode_flat
        )

    def _encode_flat(self, texts: Sequence[str]) -> Flat:
        if self._gigatoken is None:
            return flatten(self.by_library(texts))
        if self._apart is None:
            return self._gigatoken.encode_flat(texts)
        return encode_apart(
            texts,
            self._apart.search,
            lambda text: self.by_library([text])[0],
            self._gigatoken.encode_flat,
        )

    def by_library(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, by the library that defines them."""
        # One thread: the call releases the GIL, so callers run in parallel.
        try:
            ids: list[list[int]] = self.library.encode(list(texts), out_type=int, num_threads=1)
        except (RuntimeError, TypeError):
            check_unicode(texts)
            raise
        return ids

    def reference_array(self, text: str) -> NDArray[np.uint32]:
        """The ids of a text by the library; a long one in parts, if the model allows that."""
        return self._in_parts(text, lambda part: self.by_library([part])[0])

    def _in_parts(self, text: str, encode: Callable[[str], list[int]]) -> NDArray[np.uint32]:
        if not (self._cuttable and is_long(text)):
            return np.array(encode(text), np.uint32)
        # The model adds a space before each part, so a later part's own first space is dropped, or
        # before a digit the id of the space that was added.
        dropped = int(self._prefix)
        rows: list[NDArray[np.uint32]] = []
        for part in parts(text, self._seam):
            has_space = bool(rows) and part[0] == " "
            ids = encode(part[dropped:] if has_space else part)
            rows.append(np.array(ids if has_space or not rows else ids[dropped:], np.uint32))
        return np.concatenate(rows)

    def find(self, token: str) -> int | None:
        """The id of a piece; None for the unknown piece and for other texts."""
        found: int = self.library.piece_to_id(token)
        return None if found == self.library.unk_id() else found


def any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the first of some tokens; None without tokens."""
    pattern = "|".join(map(re.escape, tokens))
    return re.compile(pattern) if pattern else None
