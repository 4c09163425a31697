"""Texts that tokenizers trip over, for every type's test of equality with its reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import orjson

from trainyard.tokenizers.base import Tokenizer, as_lists

SPECIAL = ("<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>", "[CLS]", "[MASK]", "|||IP_ADDRESS|||")
"""Special tokens of one kind of tokenizer or another, spelt out."""

PIECES = (
    *SPECIAL,
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\x00", "\x1c", "\x85", "\u00a0", "\u2009"),
    *("\u3000", "\u2028", "\u200b", "\u200d", "\ufeff", "\ufffd", "\U0010ffff", "\u180e", "\u2581"),
    *("'s", "'S", "'ll", "'re", "'\u017f", "\u2019s", "a", "the", " the", "The", "A", "123", " 1"),
    *("12345", "\u0661\u0662", "\u00b2", "\u2160", "\u00bd", "...", "!?", "_", "<|", "|>", "##"),
    *("e\u0301", "\u0301", "\u00e9", "\u212b", "\u1100\u1161", "\u09bf", "\u093c", "\u0e31"),
    *("\u0645\u0631\u062d\u0628\u0627", "\u05e9\u05dc\u05d5\u05dd", "\u202e", "\u4f60\u597d"),
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1eb\U0001f1f7",
    "\U0001f44d\U0001f3fd",
    *("\u0130", "\u1e9e", "\u01c5", "\ufb01", "\u0378", "\u088f", "\U000323b0", "\U00010940"),
)
"""The last four are characters that some version of Unicode has and some has not."""

HOSTILE = (
    "",
    " ",
    "\x00",
    "The quick brown fox.\n\n  indented\ttabs",
    "na\u00efve \u4f60\u597d\u4e16\u754c \u0645\u0631\u062d\u0628\u0627",
    "NUL \x00 and <|endoftext|> inside, <s> and </s> too",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466" * 20,
    "\u0301\u0302\u0323 e\u0323\u0301 lone marks \u093c\u094d",
    "line one\r\nline two\rline three\u2028four\x85five\x0b\x0csix",
    "a" * 3000,
    "word" * 5000,
    "-" * 1000 + "=" * 1000,
    " " * 1000 + "x" + "\n" * 1000,
    "9" * 2000,
    "\u4f60" * 1000,
    "\U00020000" * 500,
    "<|endoftext|>" * 50 + "<|endoftext",
    "".join(f"<s>{i}</s>" for i in range(50)),
    '&amp;<br/>{"k": "v\\n"} \\x00 %20 http://a.b/c?d=e&f=%E4%BD%A0#g user@example.com',
)


def every_block(step: int = 1) -> list[str]:
    """Every `step`th code point that a text may hold, in rows of 64, alone and between words."""
    rows = []
    for start in (*range(0, 0x34000, 64), *range(0xE0000, 0xE0200, 64), 0xF0000, 0x10FFC0):
        points = [c for c in range(start, start + 64, step) if not 0xD800 <= c < 0xE000]
        rows.append(
            "".join(map(chr, points)) + " " + "".join(f"a{chr(c)}1{chr(c)} " for c in points)
        )
    return rows


def random_texts(count: int, seed: int = 1) -> list[str]:
    """Pieces and stray characters in any order."""
    rng = random.Random(seed)

    def stray() -> str:
        start = rng.choice(
            (rng.randrange(0, 0x250), rng.randrange(0, 0x3400), rng.randrange(0x20000))
        )
        points = (start + rng.randrange(64) for _ in range(rng.randrange(1, 6)))
        return "".join(chr(c) for c in points if not 0xD800 <= c < 0xE000)

    def text() -> str:
        parts = (
            rng.choice(PIECES) if rng.random() < 0.6 else stray() + " " * rng.randrange(3)
            for _ in range(rng.randrange(1, 40))
        )
        return "".join(parts)

    return [text() for _ in range(count)]


def corpus(path: Path, step: int = 1) -> list[str]:
    """The texts of a corpus, or one of every `step` of them."""
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return [orjson.loads(line)["text"] for k, line in enumerate(file) if k % step == 0]
    return path.read_text().split("\n\n")[::step]


def corpora_slice(shared: Path) -> list[str]:
    """A few documents of every kind."""
    steps = {"corpus_en": 4000, "wiki_zh": 400, "multilingual_mix": 24, "code": 60}
    folder = shared / "data/corpora"
    return [t for name, step in steps.items() for t in corpus(folder / f"{name}.jsonl", step)]


def small_corpora(shared: Path, step: int = 20, small_step: int = 1) -> Iterator[list[str]]:
    """The small corpora, and one of every `step` documents of the large ones."""
    folder = shared / "data/corpora"
    for name in ("multilingual_mix.jsonl", "code.jsonl", "tinyshakespeare.txt"):
        yield corpus(folder / name, small_step)
    yield corpus(folder / "wikitext-103/wiki.test.articles.jsonl", small_step)
    yield corpus(folder / "wikitext-2/wiki.valid.tokens", small_step)
    for name in ("corpus_en.jsonl", "books_en.jsonl", "wiki_zh.jsonl"):
        yield corpus(folder / name, step)


def whole_corpora(shared: Path) -> Iterator[list[str]]:
    """Every corpus, every code point, and many random texts."""
    for path in sorted((shared / "data/corpora").rglob("*")):
        if path.suffix in (".jsonl", ".txt", ".tokens"):
            yield corpus(path)
    yield every_block() + random_texts(20_000, seed=3)


def blocks(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, about a million characters at once."""
    block: list[str] = []
    letters = 0
    for text in texts:
        block.append(text)
        letters += len(text)
        if letters > 1 << 20:
            yield block
            block, letters = [], 0
    yield block


def assert_equal(
    tokenizer: Tokenizer, expect: Callable[[list[str]], list[list[int]]], texts: Sequence[str]
) -> None:
    """The tokenizer makes the ids that `expect` makes."""
    for block in blocks(texts):
        found = as_lists(tokenizer.encode_flat(block))
        for text, ours, theirs in zip(block, found, expect(block), strict=True):
            assert ours == theirs, f"{text[:200]!a}"
