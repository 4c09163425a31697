"""Forged .model files of SentencePiece and ranks of tiktoken: refused in words, or bounded."""

from __future__ import annotations

import base64
import io
import resource
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import sentencepiece

from trainyard.errors import ArtifactError, TrainyardError
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

SECONDS = 20
MIB = 1 << 20


def used(kind: str, data: bytes, folder: Path, text: str) -> None:
    path = folder / "forged.model"
    path.write_bytes(data)
    config = TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path))
    tokenizer = build_tokenizer(config)
    tokenizer.decode(tokenizer.encode(text))
    tokenizer.encode_batch([text, text])


def check_refused(kind: str, data: bytes, words: str, folder: Path) -> None:
    """It is refused in a line that names the file, soon and without much memory."""
    began = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArtifactError, match=words) as caught:
        used(kind, data, folder, "a b abc\0 \u4f60 </s>")
    assert "forged.model" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400 + len(str(folder))
    assert time.process_time() - began < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024  # KiB


# --- SentencePiece --------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(number: int, value: int | float | str | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def piece(text: str | bytes, score: float = 0.0, kind: int = 1) -> bytes:
    return field(1, field(1, text) + field(2, score) + field(3, kind))


def charsmap(trie_bytes: int, rest: bytes) -> bytes:
    return field(3, field(2, struct.pack("<I", trie_bytes) + rest))


UNKNOWN, CONTROL, USER, BYTE = 2, 3, 4, 6
UNK = piece("<unk>", 0.0, UNKNOWN)
HEAD = UNK + piece("<s>", 0.0, CONTROL) + piece("</s>", 0.0, CONTROL)
BYTES = b"".join(piece(f"<0x{i:02X}>", 0.0, BYTE) for i in range(256))
ABC = b"".join(piece(text, -1.0 - i) for i, text in enumerate("abc\u2581"))
BPE = field(2, field(3, 2))
WITH_BYTES = field(2, field(3, 2) + field(35, 1))
FAST = WITH_BYTES + field(3, field(3, 1) + field(4, 0) + field(5, 1))
"""What gigatoken takes."""
SOUND = HEAD + BYTES + ABC + piece("ab", -0.5) + FAST

WILD = b"\xff" * 1024 + b"x\0"
MODELS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "unk is not defined"),
    "zero bytes": (bytes(1 << 16), "not a SentencePiece model"),
    "text": (b"hello world\n" * 10, "not a SentencePiece model"),
    "half": (SOUND[: len(SOUND) // 2], "not a SentencePiece model"),
    "a byte is missing": (SOUND[:-1], "not a SentencePiece model"),
    "a field of a terabyte": (varint(1 << 3 | 2) + varint(2**40), "not a SentencePiece model"),
    "a field of 2^63": (varint(1 << 3 | 2) + varint(2**63 - 1), "not a SentencePiece model"),
    "a number without end": (b"\x80" * MIB, "not a SentencePiece model"),
    "groups in groups": (b"\x0b" * 100_000, "not a SentencePiece model"),
    "unknown groups": (varint(99 << 3 | 3) * 100_000, "not a SentencePiece model"),
    "no unknown piece": (piece("<s>", 0.0, CONTROL) + ABC + BPE, "unk is not defined"),
    "two unknown pieces": (HEAD + piece("<u>", 0.0, UNKNOWN) + ABC + BPE, "already defined"),
    "a piece twice": (HEAD + ABC + ABC + BPE, "already defined"),
    "a piece twice, unigram": (HEAD + ABC + ABC, "already defined"),
    "a symbol twice": (HEAD + ABC + piece("zz", 0.0, USER) * 2 + FAST, "already defined"),
    "an empty piece": (HEAD + ABC + piece("") + BPE, "must not be empty"),
    "an empty symbol": (HEAD + ABC + piece("", 0.0, USER) + BPE, "must not be empty"),
    "a zero in a piece": (HEAD + BYTES + ABC + piece("a\0b") + FAST, "null character"),
    "no UTF-8": (HEAD + BYTES + ABC + piece(b"\xff\xfe") + FAST, "can't decode byte 0xff"),
    "half a character": (HEAD + BYTES + ABC + piece(b"\xed\xa0\x80") + FAST, "can't decode"),
    "a long piece": (HEAD + BYTES + ABC + piece("a" * MIB) + FAST, "too long"),
    "a score that is none": (HEAD + BYTES + ABC + piece("ab", float("nan")) + FAST, "is nan"),
    "an infinite score": (HEAD + BYTES + ABC + piece("ab", float("inf")) + FAST, "is inf"),
    "no score, unigram": (HEAD + ABC + piece("ab", float("nan")), "NaN"),
    "bytes without pieces": (HEAD + ABC + WITH_BYTES, "256 byte pieces"),
    "a byte that is none": (HEAD + ABC + piece("<0xZZ>", 0.0, BYTE) + WITH_BYTES, "<0xZZ>"),
    "byte 256": (HEAD + BYTES + piece("<0x100>", 0.0, BYTE) + ABC + WITH_BYTES, "<0x100>"),
    "an empty map": (HEAD + ABC + BPE + charsmap(0, b""), "normalization rule is broken"),
    "a map that is cut": (HEAD + ABC + BPE + field(3, field(2, b"\1")), "is broken"),
    "a map of 2 GB": (HEAD + ABC + BPE + charsmap(2**31, b"abcd"), "exceeds the input"),
    "a map that leads out": (HEAD + ABC + BPE + charsmap(1024, WILD), "invalid"),
    "a map without end": (
        HEAD + ABC + BPE + charsmap(1024, bytes(1024) + b"xyz"),
        "null term|invalid",
    ),
}


@pytest.mark.few_cases(12)
@pytest.mark.parametrize(("data", "words"), MODELS.values(), ids=MODELS)
def test_a_forged_model_is_refused(data: bytes, words: str, tmp_path: Path) -> None:
    check_refused("GPTSentencePieceTokenizer", data, words, tmp_path)


def test_a_character_does_not_become_a_book(tmp_path: Path) -> None:
    rules, out = tmp_path / "rules.tsv", io.BytesIO()
    rules.write_text(f"61\t{'62 ' * 20_000}\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["c d e f g h i"] * 50),
        model_writer=out,
        vocab_size=40,
        hard_vocab_limit=False,
        normalization_rule_tsv=str(rules),
        minloglevel=2,
    )
    with pytest.raises(ArtifactError, match="replaces a character by 20000 bytes; the limit is"):
        used("GPTSentencePieceTokenizer", out.getvalue(), tmp_path, "aaa")


def ladder() -> bytes:
    return b"".join(piece("a" * length, -float(length)) for length in range(2, 3000))


def symbols(count: int) -> bytes:
    return b"".join(piece("a" * 50 + f"{i:05d}", 0.0, USER) for i in range(count))


def pieces(count: int) -> bytes:
    return b"".join(piece(f"p{i}", -1.0) for i in range(count))


BOUNDED: dict[str, Callable[[], bytes]] = {
    "every length of a run": lambda: HEAD + BYTES + ABC + ladder() + FAST,
    "every length, unigram": lambda: HEAD + ABC + ladder(),
    "2,000 symbols": lambda: HEAD + BYTES + ABC + symbols(2_000) + FAST,
    "kinds of others": lambda: HEAD + ABC + piece("q", 0.0, 99) + field(2, field(3, 9)),
    "special ids of others": lambda: HEAD + ABC + field(2, field(3, 2) + field(40, 2**31 - 1)),
    "the unknown piece alone": lambda: UNK + BPE,
    "100,000 pieces": lambda: HEAD + pieces(100_000) + BPE,
}
"""Made when their test runs: unit tests collect this file too."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOUNDED)
def test_a_strange_model_takes_bounded_time(kind: str, tmp_path: Path) -> None:
    data = BOUNDED[kind]()
    began = time.process_time()
    with suppress(TrainyardError):
        used("GPTSentencePieceTokenizer", data, tmp_path, 5_000 * "a")
    assert time.process_time() - began < SECONDS


# --- tiktoken -------------------------------------------------------------------------------------

ALL = [bytes([i]) for i in range(256)]


def ranked(tokens: list[bytes]) -> bytes:
    return b"\n".join(b"%s %d" % (base64.b64encode(token), i) for i, token in enumerate(tokens))


RANKS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no tokens"),
    "zero bytes": (bytes(1 << 16), "line 1 is not"),
    "a zero in a line": (ranked(ALL) + b"\nYWI\0= 256", "line 257"),
    "a token twice": (ranked([*ALL, b"ab", b"ab"]), "comes twice"),
    "a rank twice": (ranked([*ALL, b"ab"]) + b"\nYWJj 256", "line 258: rank 256 comes twice"),
    "a rank of 30 digits": (ranked(ALL) + b"\nYWI= " + b"9" * 30, "256 is missing"),
    "a rank of 10,000 digits": (ranked(ALL) + b"\nYWI= " + b"9" * 10_000, "digits"),
    "a rank of other digits": (ranked(ALL) + "\nYWI= \u0665".encode(), "line 257 is not"),
    "a negative rank": (ranked(ALL) + b"\nYWI= -1", "line 257 is not"),
    "a gap": (ranked(ALL) + b"\nYWI= 300", "256 is missing"),
    "an empty token": (ranked(ALL) + b"\n 256", "line 257"),
    "no byte 255": (ranked([*ALL[:-1], b"ab", b"cd"]), "include every byte"),
    "cut": (ranked([*ALL, b"abc"])[:-3], "line 257"),
    "a mark before": (b"\xef\xbb\xbf" + ranked(ALL), "line 1"),
    "JSON, cut": (b'[{"rank": 0, "token_bytes": "AA=', "Unterminated"),
    "JSON, deep": (b"[" * 100_000, "recursion"),
    "JSON of other types": (b"[NaN, null, {}]", "entry 0 is not"),
    "JSON of no rank": (b'[{"rank": "0", "token_bytes": "AA=="}]', "entry 0 is not"),
    "JSON of a number": (b"[" + b"9" * 10_000 + b"]", "digits"),
    "JSON of no text": (b'[{"rank": 0, "token_bytes": 5}]', "entry 0: not a token"),
}


@pytest.mark.parametrize(("data", "words"), RANKS.values(), ids=RANKS)
def test_forged_ranks_are_refused(data: bytes, words: str, tmp_path: Path) -> None:
    check_refused("TikTokenizer", data, words, tmp_path)


STRANGE_RANKS: dict[str, Callable[[], list[bytes]]] = {
    "every length of a run": lambda: [*ALL, *(b"a" * length for length in range(2, 3000))],
    "a token of a million": lambda: [*ALL, b"a" * 1_000_000],
    "tokens out of reach": lambda: [*ALL, *(b"aaa%d" % i for i in range(1000))],
    "200,000 tokens": lambda: [*ALL, *(b"%dx" % i for i in range(10, 200_000))],
    "no UTF-8": lambda: [*ALL, b"\xff\xfe\xff"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STRANGE_RANKS)
def test_strange_ranks_take_bounded_time(kind: str, tmp_path: Path) -> None:
    data = ranked(STRANGE_RANKS[kind]())
    began = time.process_time()
    with suppress(TrainyardError):
        used("TikTokenizer", data, tmp_path, 5_000 * "a")
    assert time.process_time() - began < SECONDS
