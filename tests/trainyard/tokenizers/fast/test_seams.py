"""Long texts in parts: the same ids as the whole, at every seam."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from tests.trainyard.tokenizers import kinds
from tests.trainyard.tokenizers.fast.test_gigatoken import (
    BYTES,
    CL100K,
    END,
    WORD,
    added,
    ids_of,
    library,
    split,
)
from tests.trainyard.tokenizers.hostile import HOSTILE, corpus, random_texts
from trainyard.tokenizers.fast import seams
from trainyard.tokenizers.fast.seams import (
    AFTER_LETTERS,
    CONTRACTIONS,
    EAST_ASIAN,
    UPPER_LOWER,
    UPPER_ONLY,
    encode_in_parts,
    find_seam,
    is_known,
    letter_seam,
    parts,
    word_seam,
)
from trainyard.tokenizers.tiktoken import PATTERNS
from trainyard.tokenizers.wordpiece import SPECIAL, wordpiece_library

ENDS = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{run}{CONTRACTIONS}?" for run in (UPPER_LOWER, UPPER_ONLY)
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]


def in_turn(*patterns: str) -> dict[str, Any]:
    cuts = [split(pattern)["pretokenizers"][0] for pattern in patterns]
    return {"type": "Sequence", "pretokenizers": [*cuts, BYTES | {"use_regex": False}]}


SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "prefix": {"pre_tokenizer": BYTES | {"add_prefix_space": True}},
    "nfc": {"normalizer": {"type": "NFC"}},
    "cl100k": {"pre_tokenizer": split(CL100K), "normalizer": {"type": "NFC"}},
    "o200k": {"pre_tokenizer": split(O200K + ENDS)},
    "deepseek": {"pre_tokenizer": in_turn(*DEEPSEEK)},
    "digits": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES],
        }
    },
    "tokens": {"added_tokens": [END, added("a b", WORD), added("   ", WORD + 1, normalized=True)]},
}
WHOLE: dict[str, dict[str, Any]] = {
    "unknown pattern": {"pre_tokenizer": split(r"\w+|\W")},
    "looks back": {"pre_tokenizer": split(r"(?<=a) b|\p{L}+|\s+")},
    "removed": {"pre_tokenizer": split(CL100K, "Removed")},
    "no words": {"pre_tokenizer": BYTES | {"use_regex": False}},
    "nothing": {"pre_tokenizer": None},
    "lower": {"normalizer": {"type": "Lowercase"}},
    "strips": {"added_tokens": [END, added("<mask>", WORD, rstrip=True)]},
    "by itself": {"added_tokens": [END, added("mask", WORD, single_word=True)]},
    "accented": {
        "normalizer": {"type": "NFC"},
        "added_tokens": [END, added("\u00e9t", WORD, normalized=True)],
    },
}
LETTERS = (
    "a",
    "Z",
    "the",
    "\u4f60\u597d",
    "\u3042",
    "\u30f3",
    "\ud55c",
    "\u0e01",
    "\u0628",
    "\u0431",
)
AROUND = (*AFTER_LETTERS, "'", "'s", "_", "\u0301", "\u0e31", "\u0338", "9", "  ", "\n\n", "a b")


def mixtures(count: int) -> list[str]:
    """Letters, everything that may follow them, and hostile texts, at random."""
    rng = random.Random(7)
    stray = random_texts(count, seed=3)
    return [
        "".join(
            rng.choice(LETTERS) + "".join(rng.choices(AROUND, k=rng.randrange(1, 3)))
            for _ in range(60)
        )
        + stray[k]
        for k in range(count)
    ]


def check(reference: Library, texts: Sequence[str], letters: int) -> int:
    """Compare parts and whole; returns the number of parts."""
    seam = find_seam(reference)
    assert seam is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seams, "PART_LETTERS", letters)
        rows = [encode_in_parts(t, seam, lambda part: ids_of(reference, [part])[0]) for t in texts]
        assert all("".join(parts(text, seam)) == text for text in texts)
        count = sum(len(list(parts(text, seam))) for text in texts)
    for text, row, whole in zip(texts, rows, ids_of(reference, texts), strict=True):
        assert row.tolist() == whole, f"{text[:200]!a}"
    return count


def bert(*, lower: bool = True) -> Library:
    words = ["some", "words", "a", "##b", "the", "\u4f60", "\u3002", ".", "##\u3042", "\u3042"]
    return wordpiece_library({t: i for i, t in enumerate([*SPECIAL, *words])}, lower=lower)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("letters", [1, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_make_the_ids_of_the_whole(shape: str, letters: int) -> None:
    texts = mixtures(40)
    reference = library(**SHAPES[shape])
    if shape == "prefix":  # this space is before the whole and before no other part
        texts = [" " + text for text in texts]
    few = shape == "prefix"  # there the only seams are before spaces
    assert check(reference, texts, letters) > len(texts) * (1 if few else 3)


@pytest.mark.parametrize("lower", [True, False])
def test_parts_of_word_pieces(lower: bool) -> None:
    assert check(bert(lower=lower), [*mixtures(40), *HOSTILE], 1) > 1000


@pytest.mark.parametrize("shape", WHOLE)
def test_what_is_not_known_is_not_cut(shape: str) -> None:
    assert find_seam(library(**WHOLE[shape])) is None


def test_no_seam_lies_within_an_added_token() -> None:
    seam = letter_seam(["<|endoftext|>", "<a b>"])
    assert seam is not None
    assert [m.start() for m in seam.finditer("<|endoftext|> <a b>, c. <|")] == [22]
    assert letter_seam(["a b"], " ") is None
    seam = word_seam(["\u4f60\u597d", ". x"])
    assert seam is not None
    assert [m.start() for m in seam.finditer("\u4f60\u597d. x\uff0c\u4f60")] == [6]


def test_known_patterns() -> None:
    for pattern in (CL100K, O200K + ENDS, *PATTERNS.values(), DEEPSEEK[-1]):
        assert is_known(pattern)
    for pattern in ("", r"\p{N}|\s+", O200K.split("|[^")[0] + ENDS, CL100K + "|a b"):
        assert not is_known(pattern)


def test_every_follower_of_a_letter_is_a_seam() -> None:
    seam = letter_seam([])
    assert seam is not None
    for c in AFTER_LETTERS + EAST_ASIAN:
        assert [m.start() for m in seam.finditer(f"1\u4f60{c}")] == [2], ascii(c)
    assert not list(seam.finditer("a'b_c1d\u0301e\u00e9f"))


@pytest.mark.slow
def test_surroundings_are_put_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, end = ({"SpecialToken": {"id": t, "type_id": 0}} for t in ("<|endoftext|>", "</s>"))
    text = {"Sequence": {"id": "A", "type_id": 0}}
    names = {"<|endoftext|>": [0], "</s>": [1]}
    around = {
        "type": "TemplateProcessing",
        "single": [start, text, end],
        "pair": [start, text, text],
        "special_tokens": {t: {"id": t, "ids": i, "tokens": [t]} for t, i in names.items()},
    }
    document = json.loads(library(post_processor=around).to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    texts = mixtures(5)
    for fast in (True, False):
        built = kinds.huggingface(tmp_path, use_gigatoken=fast)
        whole = [built.encode_reference(text) for text in texts]
        assert whole[0][0] == 0
        assert whole[0][-1] == 1
        with monkeypatch.context() as patch:
            patch.setattr(seams, "PART_LETTERS", 20)
            assert built.encode_batch(texts) == whole
            assert [built.encode_reference(text) for text in texts] == whole
            assert [built.reference_array(text).tolist() for text in texts] == whole


@pytest.mark.parametrize("kind", ["gpt2", "neox", "bert-uncased", "bert-cased", "bert-chinese"])
@pytest.mark.slow
def test_parts_of_the_shared_corpora(shared: Path, kind: str) -> None:
    reference = kinds.build(shared, kind).library  # type: ignore[attr-defined]
    folder = shared / "data/corpora"
    for name in ("wiki_zh", "multilingual_mix", "code"):
        texts = [text[:20_000] for text in corpus(folder / f"{name}.jsonl", step=97)][:60]
        assert check(reference, texts, 200) > 2 * len(texts)


def test_parts_without_letters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "PART_LETTERS", 0)
    with pytest.raises(AssertionError, match="without end"):
        next(parts("some text", re.compile("(?<=e)(?= )")))
