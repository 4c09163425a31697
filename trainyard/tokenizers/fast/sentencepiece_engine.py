"""The ids of a SentencePiece model: by gigatoken where it makes the same, else by the library."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from trainyard.errors import ArtifactError
from trainyard.tokenizers.base import Flat, check_unicode, flatten, join_rows
from trainyard.tokenizers.fast.gigatoken import Gigatoken, gigatoken_for_pieces, replace_rows
from trainyard.tokenizers.fast.parts import SPACE_SEAM, any_long, parts
from trainyard.tokenizers.fast.sentencepiece_model import USER_DEFINED, is_cuttable, parse_pieces
from trainyard.tokenizers.fast.unigram import LONG_LETTERS, Windows, find_windows


class Pieces:
    """The ids of a model: by gigatoken where it makes the same ones, else by the library."""

    def __init__(self, data: bytes, url: str, use_gigatoken: bool) -> None:
        try:
            self.library = sentencepiece.SentencePieceProcessor()
            self.library.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise ArtifactError(
                f"--tokenizer-model {url}: not a SentencePiece model: {error}"
            ) from None
        model = parse_pieces(data, f"--tokenizer-model {url}")
        # SentencePiece cuts a text at these first; gigatoken would do it in another way.
        self._apart = any_of(model.pieces_of(USER_DEFINED))
        self._cuttable = is_cuttable(model)
        self._model, self._data = model, data
        self._gigatoken: Gigatoken | None = None
        if use_gigatoken:
            self._gigatoken = gigatoken_for_pieces(model, self.by_library, self._apart)

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
        if self._gigatoken and self._apart is None:
            return self._gigatoken.encode_flat(texts)
        if self._cuttable and any_long(texts):  # the library takes 45 bytes for one of the text
            return join_rows([self._in_parts(text, self.encode) for text in texts])
        if self._gigatoken is None:
            if any(len(text) > LONG_LETTERS for text in texts):
                return join_rows([self.reference_array(text) for text in texts])
            return flatten(self.by_library(texts))
        assert self._apart is not None
        return encode_apart(
            texts,
            self._apart,
            lambda text: self.by_library([text])[0],
            self._gigatoken.encode_flat,
        )

    def by_library(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, by the library that defines them."""
        # One thread: whoever wants more calls from several, and this lets go of the GIL.
        try:
            ids: list[list[int]] = self.library.encode(list(texts), out_type=int, num_threads=1)
        except (RuntimeError, TypeError):
            check_unicode(texts)
            raise
        return ids

    def reference_array(self, text: str) -> NDArray[np.uint32]:
        """The ids of a text by the library, a long one in parts where the model lets it be cut, or
        in windows where it lets these be made; else the library holds 20 to 40 bytes for each of
        the text."""
        if self._cuttable and any_long([text]):
            return self._in_parts(text, lambda part: self.by_library([part])[0])
        if len(text) > LONG_LETTERS and self._windows:
            ids = self._windows.encode(text)
            if ids is not None:
                return ids
        return np.array(self.by_library([text])[0], np.uint32)

    @cached_property
    def _windows(self) -> Windows | None:
        return find_windows(self._model, self._data, self.library)

    def _in_parts(self, text: str, encode: Callable[[str], list[int]]) -> NDArray[np.uint32]:
        # The model puts a space before each part, so the one of the text is left out.
        cut = enumerate(parts(text, SPACE_SEAM))
        rows = (np.array(encode(part[1:] if k else part), np.uint32) for k, part in cut)
        return np.concatenate([np.zeros(0, np.uint32), *rows])

    def find(self, token: str) -> int | None:
        """The id of a piece; None for what is not one, and for the unknown piece."""
        found: int = self.library.piece_to_id(token)
        return None if found == self.library.unk_id() else found


def any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """What finds the first of some tokens; None where there are none."""
    pattern = "|".join(map(re.escape, tokens))
    return re.compile(pattern) if pattern else None


def encode_apart(
    texts: Sequence[str],
    what: re.Pattern[str],
    encode: Callable[[str], Sequence[int] | NDArray[np.uint32]],
    encode_flat: Callable[[Sequence[str]], Flat],
) -> Flat:
    """The ids of texts: of each in which something is found by `encode`, of the others at once."""
    numbers = [i for i, text in enumerate(texts) if what.search(text)]
    if not numbers:
        return encode_flat(texts)
    found = set(numbers)
    flat = encode_flat(["" if i in found else text for i, text in enumerate(texts)])
    return replace_rows(flat, numbers, [encode(texts[i]) for i in numbers])
