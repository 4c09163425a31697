"""Texts of megabytes for a SentencePiece unigram model: in windows, with the ids of the whole.

The library goes over a text once, keeping for every place the best score that ends there, rounded
to 32 bits, and 20 to 40 bytes in all for each of the text. Between two characters that are side by
side in no piece, such as before a space, everything that came is one number. But a window must
begin with that number, since what is rounded decides between pieces that are nearly as good.

So a window is given to a second model. It has the pieces of the first, and one for each power of
two: characters that no text has, whose scores add up to any number without rounding. Since the
lowest score of a model says what an unknown character costs, which these change, unknown characters
become one that has a piece with the right score.

The number at the end of a window is the sum of its pieces, rounded as the library rounds, but for
one thing. Where a score falls below a threshold, the library takes it away from all that are yet
to go on, perhaps in the middle of a word: words near there are gone over here, place by place."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from trainyard.tokenizers.fast import parts
from trainyard.tokenizers.fast.seams import LETTERS
from trainyard.tokenizers.fast.sentencepiece_model import (
    BYTE,
    NORMAL,
    SPACE,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    PieceModel,
    VocabPiece,
    extended,
)

LONG_LETTERS = 1 << 21
"""Of a longer text windows are made: the library needs a hundred megabytes for a shorter one."""

PLAIN = re.compile(f"[!-~{LETTERS}]")
"""Characters that stand for themselves when they are normalized, but for their case; so does a
single space between two of them. None of the rules looks at two of them together."""

RULES = ("", "identity", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf")
"""Of normalization, those that look at no space together with its neighbours."""

POWERS = range(18, -48, -1)
UNKNOWN_PENALTY = np.float32(10)
THRESHOLD = np.float32(100_000)
LONGEST_WORD = 1 << 16
STEP = 1 << 14
"""Tokens summed at once."""

Ids = NDArray[np.int64]


def find_windows(
    model: PieceModel, data: bytes, library: sentencepiece.SentencePieceProcessor
) -> Windows | None:
    """For a model in which windows are possible, by a library whose way of adding is known."""
    lattice = {p.text for p in model.pieces if p.kind in (NORMAL, USER_DEFINED)}
    across = re.compile(f"[^{SPACE}]{SPACE}| ")
    symbols = model.pieces_of(USER_DEFINED)
    plain = model.prefix and model.escapes_spaces and not model.space_after
    if (
        model.algorithm != UNIGRAM
        or model.rules not in RULES
        or not plain
        or SPACE not in lattice
        or any(across.search(text) for text in lattice)
        or any(SPACE in text for text in symbols)
        or not takes_away()
    ):
        return None
    return Windows(model, data, library)


def takes_away() -> bool:
    """Whether this version of the library keeps its scores small, by the ids that follow: -0.999
    and -1 are more than -2 unless they are added to -120000."""
    scores = {"x": -60000.0, "p": -0.999, "q": -1.0, "pq": -2.0}
    pieces = [
        VocabPiece("<unk>", 0, UNKNOWN),
        *(VocabPiece(t, s, NORMAL) for t, s in scores.items()),
    ]
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(extended(b"", pieces))
    found: list[int] = processor.encode("xxpq")
    return found == [1, 1, 2, 3]


class Windows:
    """The ids of long texts."""

    def __init__(
        self,
        model: PieceModel,
        data: bytes,
        library: sentencepiece.SentencePieceProcessor,
    ) -> None:
        self._library = library
        lattice = {p.text for p in model.pieces if p.kind in (NORMAL, USER_DEFINED)}
        self._known = set("".join(lattice))
        free = (c for c in map(chr, range(0x10FFFD, 0xF0000, -1)) if c not in self._known)
        powers = [math.ldexp(1, power) for power in POWERS]
        self._powers = {score: next(free) for power in powers for score in (-power, power)}
        self._stranger = next(free)
        # A character that is in pieces and none by itself is unknown where it is left over.
        unknown = [self._stranger, *sorted(self._known - lattice)]
        normal = [np.float32(p.score) for p in model.pieces if p.kind == NORMAL]
        lowest = min(normal) - UNKNOWN_PENALTY
        added = [VocabPiece(c, score, NORMAL) for score, c in self._powers.items()]
        self._first_unknown = len(model.pieces) + len(added)
        added += [VocabPiece(c, float(lowest), NORMAL) for c in unknown]
        pieces = [*model.pieces, *added]
        self._model = sentencepiece.SentencePieceProcessor()
        self._model.LoadFromSerializedProto(extended(data, added))
        self._scores = np.array([_score(piece) for piece in pieces], np.float32)
        self._lengths = np.array([len(piece.text) for piece in pieces], np.int64)
        self._drop = float(-min(lowest, np.float32(-1)))
        self._ids = {p.text: i for i, p in enumerate(pieces) if p.kind in (NORMAL, USER_DEFINED)}
        self._longest = max(map(len, self._ids))
        self._beside = {pair for text in lattice for pair in map("".join, pairwise(text))}
        self._pairs = np.unique([_code(pair) for pair in sorted(self._beside)]).astype(np.int64)
        self._folds = model.rules.endswith("_cf")
        self._unknown = next(i for i, p in enumerate(pieces) if p.kind == UNKNOWN)
        self._bytes: NDArray[np.int64] | None = None
        if model.byte_fallback:
            numbers = {p.text: i for i, p in enumerate(pieces) if p.kind == BYTE}
            self._bytes = np.array([numbers[f"<0x{b:02X}>"] for b in range(256)], np.int64)

    def encode(self, text: str) -> NDArray[np.uint32] | None:
        """The ids of a text; None where they cannot be told."""
        ends = self._ends(text)
        if ends is None:
            return None
        state, was_unknown = np.float32(0), False
        rows = []
        for start, end in pairwise([0, *ends, len(text)]):
            normal = self._normal(text[start:end], start == 0)
            strangers = set(normal) - self._known
            strange = dict.fromkeys(map(ord, strangers), self._stranger)
            plain = normal.translate(strange) if strange else normal
            prefix = self._spelt(state)
            if prefix is None:
                return None
            found = self._model.encode(prefix + plain, out_type="numpy")[len(prefix) :]
            ids = np.asarray(found, np.int64)
            rows.append(self._told(ids, normal, was_unknown).astype(np.uint32))
            was_unknown = len(ids) > 0 and bool(ids[-1] >= self._first_unknown)
            after = self._state_after(state, plain, ids)
            if after is None:
                return None
            state = after
        return np.concatenate(rows)

    def _ends(self, text: str) -> list[int] | None:
        """Where windows end; None where one would be as long as a text that is none."""
        ends: list[int] = []
        place = parts.PART_LETTERS
        while place < len(text):
            places = range(place, min(place + LONG_LETTERS, len(text) - 1))
            found = next((i for i in places if self._is_seam(text, i)), None)
            if found is None:
                return ends if len(text) - place < LONG_LETTERS else None
            ends.append(found)
            place = found + parts.PART_LETTERS
        return ends

    def _is_seam(self, text: str, place: int) -> bool:
        before, behind = text[place - 1], text[place]
        if not PLAIN.match(before):
            return False
        if behind == " ":
            return PLAIN.match(text, place + 1) is not None
        if self._folds or not PLAIN.match(behind):
            return False
        return before + behind not in self._beside

    def _normal(self, part: str, is_first: bool) -> str:
        """A part of a text as the model has it; the library puts a space before it."""
        bare = not is_first and part[0] != " "
        spaced = not is_first and part[0] == " "
        normal: str = self._library.normalize(part[1:] if spaced else part)
        return normal[1:] if bare else normal

    def _spelt(self, state: np.float32) -> str | None:
        """Characters whose scores add up to a number, from the largest on."""
        left, found = float(state), ""
        for score, character in self._powers.items():
            if left * score > 0 and abs(left) >= abs(score):
                left -= score
                found += character
        return found if left == 0 else None

    def _told(self, ids: Ids, normal: str, was_unknown: bool) -> Ids:
        """With what the library says of unknown characters: bytes, or one id for a row of them."""
        found = ids >= self._first_unknown
        if not found.any():
            return ids
        if self._bytes is None:
            first = found & ~np.concatenate([[was_unknown], found[:-1]])
            told: Ids = np.where(found, self._unknown, ids)[first | ~found]
            return told
        places = (np.cumsum(self._lengths[ids]) - 1)[found]
        spelt = [self._bytes[list(normal[place].encode())] for place in places.tolist()]
        counts = np.ones(len(ids), np.int64)
        counts[found] = [len(row) for row in spelt]
        out = np.repeat(ids, counts)
        out[np.repeat(found, counts)] = np.concatenate(spelt)
        return out

    def _state_after(self, state: np.float32, text: str, ids: Ids) -> np.float32 | None:
        """The score at the end of a text that begins with another."""
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64)
        codes = points[:-1] << 32 | points[1:]
        near = self._pairs.take(np.searchsorted(self._pairs, codes), mode="clip")
        words = np.concatenate([[0], 1 + np.flatnonzero(near != codes), [len(points)]])
        places = np.concatenate([[0], np.cumsum(self._lengths[ids])])
        tokens = np.searchsorted(places, words)
        if not len(points) or np.diff(words).max() > LONGEST_WORD or places[-1] != len(points):
            return None
        depths = np.diff(words) * self._drop + 1
        k = 0
        while k < len(words) - 1:
            upto = max(k + 1, int(np.searchsorted(tokens, tokens[k] + STEP)) - 1)
            scores = self._scores[ids[tokens[k] : tokens[upto]]]
            sums = np.add.accumulate(np.concatenate([[state], scores]), dtype=np.float32)
            begins = sums[tokens[k : upto + 1] - tokens[k]]
            if float(begins.max()) >= THRESHOLD:
                return None
            low = np.flatnonzero(begins[:-1] - depths[k:upto] < -THRESHOLD)
            if not len(low):
                k, state = upto, begins[-1]
                continue
            k += int(low[0])
            state, told = self._word(begins[low[0]], text[words[k] : words[k + 1]])
            if told != ids[tokens[k] : tokens[k + 1]].tolist():
                return None
            k += 1
        return state

    def _word(self, state: np.float32, word: str) -> tuple[np.float32, list[int]]:
        """The score behind a word and its ids, as the library finds them."""
        best: list[np.float32 | None] = [state] + [None] * len(word)
        back = [(0, 0)] * (len(word) + 1)
        for i in range(len(word)):
            here = best[i]
            assert here is not None, "every character has a piece"
            if here < -THRESHOLD:
                best = [score if score is None else score - here for score in best]
                here = np.float32(0)
            for j in range(i + 1, min(i + self._longest, len(word)) + 1):
                piece = self._ids.get(word[i:j])
                if piece is None:
                    continue
                score, other = self._scores[piece] + here, best[j]
                if other is None or score > other:
                    best[j], back[j] = score, (i, piece)
        last = best[-1]
        assert last is not None
        return last, list(_path(back))[::-1]


def _path(back: list[tuple[int, int]]) -> Iterator[int]:
    place = len(back) - 1
    while place:
        place, piece = back[place]
        yield piece


def _code(pair: str) -> int:
    return ord(pair[0]) << 32 | ord(pair[1])


def _score(piece: VocabPiece) -> np.float32:
    if piece.kind == USER_DEFINED:
        return np.float32(0.1) * np.float32(len(piece.text.encode()) - 1)
    return np.float32(piece.score)
