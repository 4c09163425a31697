"""Reads the .model file of SentencePiece without protobuf; converts it to a tokenizer.json.

gigatoken reads .model files too, but treats control pieces such as "<s>" as tokens to find in a
text, which SentencePiece does not. So it gets a tokenizer.json without them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from string import digits

from trainyard.errors import ArtifactError

SPACE = "\u2581"
"""Stands for a space in a piece."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of pieces, as sentencepiece_model.proto numbers them."""

BPE = 2
MAX_REPLACEMENT_BYTES = 100
"""Of one character; NFKC's longest has 33. More would let a small text fill the memory."""

MAX_CUT_CHARS = 10**8
"""Of all cuts of all pieces, which a tokenizer.json lists: usual models have less than a fifth."""

ALGORITHMS = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}

# Field numbers of sentencepiece_model.proto.
PIECES, TRAINER, NORMALIZER, DENORMALIZER = 1, 2, 3, 5
PIECE_TEXT, PIECE_SCORE, PIECE_KIND = 1, 2, 3
TRAINER_ALGORITHM, TRAINER_SPACE_AFTER, TRAINER_BYTE_FALLBACK = 3, 24, 35
NORMALIZER_CHARSMAP, NORMALIZER_PREFIX, NORMALIZER_REMOVE, NORMALIZER_ESCAPE = 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class VocabPiece:
    """A token of the vocabulary; its id is its index."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class PieceModel:
    """The settings of a .model that determine how text becomes pieces."""

    pieces: tuple[VocabPiece, ...]
    algorithm: int
    byte_fallback: bool
    """Whether characters without a piece become pieces of bytes."""
    space_after: bool
    """Whether spaces belong to the word before them."""
    rewrites: bool
    """Whether characters are normalized, by NFKC or otherwise."""
    prefix: bool
    """Whether a space is added before a text."""
    removes_spaces: bool
    """Whether runs of spaces become one, and spaces at the ends are removed."""
    escapes_spaces: bool
    """Whether spaces are written as `SPACE`."""

    def pieces_of(self, kind: int) -> list[str]:
        """The pieces of a kind, in order of their ids."""
        return [piece.text for piece in self.pieces if piece.kind == kind]


def parse_pieces(data: bytes, name: str) -> PieceModel:
    """The contents of a .model. Raises ArtifactError if it is not one. name: for messages."""
    try:
        return _parse(data)
    except (IndexError, ValueError, TypeError, struct.error) as error:
        raise ArtifactError(f"{name}: not a SentencePiece model: {error}") from None


def _parse(data: bytes) -> PieceModel:
    pieces: list[VocabPiece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for field, value in _fields(data):
        if field == PIECES:
            pieces.append(_piece(dict(_fields(_bytes(value)))))
        elif field == TRAINER:
            trainer |= dict(_fields(_bytes(value)))  # the last of repeated fields counts
        elif field in (NORMALIZER, DENORMALIZER):
            fields = dict(_fields(_bytes(value)))
            _check_growth(_bytes(fields.get(NORMALIZER_CHARSMAP, b"")))
            normalizer |= fields if field == NORMALIZER else {}
    if not pieces:
        raise ValueError("it has no pieces")
    return PieceModel(
        pieces=tuple(pieces),
        algorithm=int(trainer.get(TRAINER_ALGORITHM, 1)),
        byte_fallback=bool(trainer.get(TRAINER_BYTE_FALLBACK, 0)),
        space_after=bool(trainer.get(TRAINER_SPACE_AFTER, 0)),
        rewrites=bool(normalizer.get(NORMALIZER_CHARSMAP, b"")),
        prefix=bool(normalizer.get(NORMALIZER_PREFIX, 1)),
        removes_spaces=bool(normalizer.get(NORMALIZER_REMOVE, 1)),
        escapes_spaces=bool(normalizer.get(NORMALIZER_ESCAPE, 1)),
    )


def _check_growth(charsmap: bytes) -> None:
    """charsmap: size of a trie (uint32), the trie, and replacements that end in zero bytes."""
    trie_bytes = int.from_bytes(charsmap[:4], "little")
    longest = max(map(len, charsmap[4 + trie_bytes :].split(b"\0")))
    if longest > MAX_REPLACEMENT_BYTES:
        raise ValueError(
            f"it replaces a character by {longest} bytes; the limit is {MAX_REPLACEMENT_BYTES}"
        )


def _piece(fields: dict[int, int | bytes]) -> VocabPiece:
    (score,) = struct.unpack("<f", _bytes(fields.get(PIECE_SCORE, bytes(4))))
    text = _bytes(fields.get(PIECE_TEXT, b"")).decode()
    if not math.isfinite(score):
        raise ValueError(f"the score of a piece is {score}")
    return VocabPiece(text, score, int(fields.get(PIECE_KIND, NORMAL)))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of every field of a protobuf message: numbers as int, the rest as bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if kind == 2:
            length, place = _varint(data, place)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"byte {place} begins no field")
        if place + length > len(data):
            raise ValueError(f"it is cut off within a field at byte {place}")
        yield key >> 3, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place
        shift += 7


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a string should be")
    return value


def is_cuttable(model: PieceModel) -> bool:
    """Whether a text may be encoded in parts, cut before single spaces.

    A model that adds a space before a text gets each part without its first space. A unigram model
    chooses the best pieces from all of a text, with rounding, so its texts cannot be cut."""
    words = all(SPACE not in p.text.lstrip(SPACE) and " " not in p.text for p in model.pieces)
    symbols = any(SPACE in text for text in model.pieces_of(USER_DEFINED))
    plain = model.escapes_spaces and not model.space_after and not model.rewrites
    keeps = model.prefix or not model.removes_spaces
    return model.algorithm == BPE and plain and keeps and words and not symbols


def has_lone_digits(model: PieceModel) -> bool:
    """Whether each digit is a piece, and so is a space, and no other piece of text has a digit."""
    texts = [p.text for p in model.pieces if p.kind not in (UNKNOWN, CONTROL, BYTE)]
    with_digit = sorted(text for text in texts if any(digit in text for digit in digits))
    return with_digit == sorted(digits) and SPACE in texts


# --- for gigatoken ----------------------------------------------------------------------------


def refusal_of_pieces(model: PieceModel) -> str | None:
    """Why gigatoken must not encode for this model; None if it may."""
    if model.algorithm != BPE:
        kind = ALGORITHMS.get(model.algorithm, model.algorithm)
        return f"no SentencePiece model of kind {kind}"
    if not model.byte_fallback or len(model.pieces_of(BYTE)) != 256:
        return "no SentencePiece model without pieces for bytes"
    if model.rewrites or model.removes_spaces or model.space_after or not model.escapes_spaces:
        return "no SentencePiece model that normalizes characters or spaces"
    if model.pieces_of(UNUSED):
        return "no SentencePiece model with pieces out of use"
    if any(SPACE in text or " " in text or not text for text in model.pieces_of(USER_DEFINED)):
        return "no SentencePiece model with spaces in pieces defined by a user"
    if sum(len(text) ** 2 for text in model.pieces_of(NORMAL)) > MAX_CUT_CHARS:
        return "no SentencePiece model with so many long pieces"
    if _ties(model):
        return "no SentencePiece model with pieces of equal score"
    return None


def _ties(model: PieceModel) -> bool:
    """Whether pieces have equal scores: SentencePiece then merges the leftmost in the text first,
    gigatoken the first in its list. Runs of one character are the same in both."""
    normal = sorted((p for p in model.pieces if p.kind == NORMAL), key=attrgetter("score"))
    for _, group in groupby(normal, key=attrgetter("score")):
        tied = [piece.text for piece in group if len(piece.text) > 1]  # only these are merged
        if len(tied) > 1 and any(len(set(text)) > 1 for text in tied):
            return True
    return False


def tokenizer_json(model: PieceModel) -> bytes:
    """The tokenizer.json that makes the same ids of any text without user-defined pieces."""
    normalizers: list[dict[str, object]] = []
    if model.prefix:
        normalizers.append({"type": "Prepend", "prepend": SPACE})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    document: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": next(iter(model.pieces_of(UNKNOWN)), None),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece.text: i for i, piece in enumerate(model.pieces)},
            "merges": _merges(model),
        },
    }
    return json.dumps(document).encode()


def _merges(model: PieceModel) -> list[tuple[str, str]]:
    """Every way to merge two pieces into one, the best score first. Of equal scores, a longer left
    half comes first, which grows runs from the left as SentencePiece does."""
    normal = set(model.pieces_of(NORMAL))
    ways = [
        (piece.score, cut, piece.text)
        for piece in model.pieces
        if piece.kind == NORMAL
        for cut in range(1, len(piece.text))
        if piece.text[:cut] in normal and piece.text[cut:] in normal
    ]
    ways.sort(key=lambda way: (way[0], way[1], len(way[2])), reverse=True)
    return [(text[:cut], text[cut:]) for _, cut, text in ways]
