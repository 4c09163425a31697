"""N-grams are found wherever words are the same; a text is split as upstream splits it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.collection.contamination import prefilter
from trainyard.collection.contamination.ngrams import WORD, Matcher, task_ngrams
from trainyard.collection.contamination.prefilter import LAST_CASED, NO_TOKEN, Prefilter
from trainyard.collection.contamination.split import clean_pieces, split_at
from trainyard.collection.contamination.tasks import read_task
from trainyard.collection.words import lowered
from trainyard.errors import DataError

WORDS = [f"w{i}" for i in range(12)]


def test_ngrams_of_a_text_by_its_number_of_words() -> None:
    texts = ["One two three.", "a b c d", "a b c d e f"]
    assert list(task_ngrams(texts, least=4, most=5)) == ["a b c d", "a b c d e", "b c d e f"]


def test_hits_are_those_of_a_search_of_every_window() -> None:
    rng = random.Random(0)
    for _ in range(60):
        items = [" ".join(rng.choices(WORDS, k=rng.randrange(2, 6))) for _ in range(4)]
        ngrams = task_ngrams(items, least=2, most=3)
        words = rng.choices(WORDS, k=40)
        text = ", ".join(words)
        found = list(Matcher(ngrams).hits(text))
        expected = [
            (at, " ".join(words[at : at + n]))
            for at in range(len(words))
            for n in (3, 2)
            if at + n <= len(words) and " ".join(words[at : at + n]) in ngrams
        ]
        assert [(hit.word, hit.ngram) for hit in found] == expected
        assert all(text[hit.start :].startswith(hit.ngram.split()[0]) for hit in found)


LETTERS = ["\u00e9t\u00e9", "\u0130", "\u212aelvin", "\u4e2d\u6587", "\u00df", "longer_than_8"]


@pytest.mark.parametrize("size", [1, 3, 6, 13])
def test_every_text_with_an_ngram_is_a_suspect_and_no_strange_one_is(size: int) -> None:
    rng = random.Random(size)
    items = [" ".join(rng.choices([*WORDS, *LETTERS], k=size)) for _ in range(20)]
    ngrams = task_ngrams(items, least=size, most=size)
    signs = (" ", ", ", "\u2019", "\n\n", " \u2014 ", "\u0301 ")
    texts = []
    for number in range(200):
        words = [f"{word}x{number}" for word in rng.choices(WORDS, k=30)]
        if number % 2:
            words[9:9] = rng.choice([str.upper, str.title, str])(rng.choice(items)).split()
        texts.append("".join(word + rng.choice(signs) for word in words))
    matcher, found = Matcher(ngrams), Prefilter(ngrams)
    having = {number for number, text in enumerate(texts) if any(matcher.hits(text))}
    assert len(having) > 60
    assert having <= set(found.suspects(texts))
    if size > 1:  # a pair of words is the least key
        assert found.suspects(texts[::2]) == []


SCRAPS = st.one_of(
    st.text(min_size=1, max_size=4),
    st.sampled_from(
        ["of", "the", "w_1", "k", "KELVIN", "\u212aelvin", "I", "\u0130", "\u03a3a\u03a3", "7"]
    ),
)


@settings(max_examples=30, deadline=None)
@given(
    items=st.lists(st.lists(SCRAPS, min_size=1, max_size=16).map(" ".join), min_size=1, max_size=8),
    around=st.lists(SCRAPS, max_size=12),
    signs=st.sampled_from([" ", ",", "\n\n", "\u2019", "\u0301 ", "\x00", "\x7f", "_ "]),
    sizes=st.sampled_from([(1, 1), (1, 3), (2, 5), (4, 13)]),
    change=st.sampled_from([str, str.upper, str.title, str.swapcase]),
    few=st.sampled_from([0, prefilter.FEW_LETTERS]),
)
def test_no_text_with_an_ngram_is_missed(
    items: list[str],
    around: list[str],
    signs: str,
    sizes: tuple[int, int],
    change: Callable[[str], str],
    few: int,
) -> None:
    ngrams = task_ngrams(items, *sizes)
    wholes = [change(item).replace(" ", signs) for item in items]
    texts = [*wholes, *(signs.join([*around, whole, *around]) for whole in wholes), *around]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefilter, "FEW_LETTERS", few)
        matcher, found = Matcher(ngrams.keys()), Prefilter(ngrams)
    having = {number for number, text in enumerate(texts) if any(matcher.hits(text))}
    assert having <= set(found.suspects(texts))


def test_no_other_letter_has_an_ascii_letter_as_its_lower_case() -> None:
    cased = [one for one in map(chr, range(128, sys.maxunicode + 1)) if one.lower() != one]
    assert [one for one in cased if one.lower().isascii()] == ["\u212a"]
    assert "\u212a".lower() == chr(NO_TOKEN)
    assert ord(cased[-1]) <= LAST_CASED


def test_places_are_those_of_the_text_though_a_letter_gets_longer_in_lower_case() -> None:
    text = "\u0130stanbul WAS Once a name of it"
    assert len(text.lower()) > len(text) == len(lowered(text))
    (hit,) = Matcher({"was once a name"}).hits(text)
    assert text[hit.start :].startswith("WAS")


def test_a_word_of_many_letters_is_looked_at_once() -> None:
    """Looking at the rest of such words from each letter would take hours."""
    letters = [chr(0x4E00 + number) for number in range(prefilter.FEW_LETTERS - 2)]
    found = Prefilter({"\u00fc", "x\u00e9x", *letters})
    size = 10**5
    for word in ("a" * 10 * size + "\u00fc", "\u00fc" * size, "".join(letters) * (size // 100)):
        assert not found.has_word(word)
        assert found.has_word(f"{word} X\u00c9X")


@given(
    words=st.sets(st.text("ab\u00e9\u00fc", min_size=1, max_size=4), min_size=1, max_size=3),
    text=st.text("ab\u00e9\u00fc ", max_size=30),
)
def test_words_of_a_text_are_found_by_their_letters(words: set[str], text: str) -> None:
    assert Prefilter(words).has_word(text) == (not words.isdisjoint(WORD.findall(text)))


def upstream_split(text: str, start: int, seq: str, each_side: int) -> tuple[str, str]:
    """What Megatron-LM's filter_ngrams.py is described to do, one character at a time."""
    at, first, second = start - each_side, "", ""
    while at > 0 and text[at] not in ".!?":
        at -= 1
    if at > 0:
        first = "".join(text[i] for i in range(at + 1))
    at = start + len(seq) + each_side
    while at < len(text) and text[at] not in ".!?":
        at += 1
    if at + 1 < len(text):
        second = "".join(text[i] for i in range(at + 1, len(text)))
    return first, second


def test_a_text_is_cut_at_sentences_on_both_sides() -> None:
    rng = random.Random(1)
    matcher = Matcher({"x y z"})
    for _ in range(200):
        words = [w + rng.choice(["", "", "", ".", "!"]) for w in rng.choices(WORDS, k=60)]
        words[rng.randrange(60)] = "X y  z"
        text = " ".join(words)
        hit = next(matcher.hits(text))
        side = rng.randrange(60)
        end, start = split_at(text, hit, side)
        upstream = upstream_split(text, hit.start, hit.ngram, side)
        assert (text[:end], text[start:]) == upstream


def test_pieces_by_hand() -> None:
    matcher = Matcher({"hit one two"})
    text = "Left stays here. Close left hit one two close right. Right stays here. And hit one two."
    pieces, found = clean_pieces(text, matcher, each_side=5, shortest=10)
    assert pieces == ["Left stays here.", " Right stays here."]
    assert found == ["hit one two"] * 2
    assert clean_pieces(text, matcher, each_side=5, shortest=17)[0] == [" Right stays here."]
    assert clean_pieces("Nothing.", matcher, 5, 10) == (["Nothing."], [])


def test_what_is_behind_a_hit_is_cut_as_a_text_of_its_own() -> None:
    """Upstream looks at the rest again; here the hits of the whole text are found once."""
    rng = random.Random(2)
    matcher = Matcher({"x y z", "w1 w2"})
    for _ in range(100):
        words = [w + rng.choice(["", "", ".", "!"]) for w in rng.choices([*WORDS, "x y z"], k=50)]
        text, side = " ".join(words), rng.randrange(30)
        expected, rest = [], text
        while (hit := next(matcher.hits(rest), None)) is not None and len(rest) > 5:
            end, start = split_at(rest, hit, side)
            expected += [rest[:end]] if end > 5 else []
            rest = rest[start:]
        expected += [rest] if len(rest) > 5 or rest == text else []
        assert clean_pieces(text, matcher, side, 5)[0] == expected


FILES = {
    "squad": ({"data": [{"paragraphs": [{"qas": [{"question": "Who?"}]}]}]}, ["Who?"]),
    "race": ({"article": "long", "questions": ["What?", "Why?"]}, ["What?", "Why?"]),
    "nq": ({"question": "when was it", "answer": ["then"]}, ["when was it"]),
    "natural_questions": ({"question": {"text": "when"}}, ["when"]),
    "lambada": ({"text": "A story."}, ["A story."]),
    "piqa": ({"goal": "Make tea."}, ["Make tea."]),
    "mine.of": ({"prompt": "Go on:"}, ["Go on:"]),
}


@pytest.mark.parametrize("name", FILES)
def test_evaluation_sets_in_their_own_format(name: str, tmp_path: Path) -> None:
    document, expected = FILES[name]
    path = tmp_path / "set.json"
    path.write_text(json.dumps(document))
    assert list(read_task(name, [str(path)])) == expected


def test_tables_and_plain_text(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text('id\tquestion1\tquestion2\n1\tA "b?\tC?\n')
    (tmp_path / "wiki.tokens").write_text(" = Title = \n text\n")
    assert list(read_task("glue", [str(tmp_path / "dev.tsv")])) == ['A "b?', "C?"]
    assert list(read_task("x", [str(tmp_path / "dev.tsv")])) == ['A "b?', "C?"]
    assert list(read_task("y", [str(tmp_path / "wiki.tokens")])) == [" = Title = ", " text"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("squad", "{}", "not a file of SQuAD"),
        ("squad", "[" * 100_000, "not a JSON document"),
        ("nq", '{"q": "x"}', "line 1: none of the keys question"),
        ("nq", '{"question": 1}', "neither a text nor a list of texts"),
        ("nq", "[]", "not a JSON object"),
        ("glue", "a\tb\n", "names none of the columns sentence"),
        ("wikitext", "\udcff", "not UTF-8"),
    ],
)
def test_another_format_is_refused(name: str, text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "set"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=words):
        list(read_task(name, [str(path)]))
