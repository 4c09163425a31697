"""What is skimmed is what reading gives: no document with an n-gram is missed, no line is taken
that orjson refuses."""

from __future__ import annotations

import json
import random

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.collection.contamination.ngrams import Matcher, task_ngrams
from trainyard.collection.contamination.prefilter import Prefilter
from trainyard.collection.contamination.skim import Skimmed, Skimmer

pytestmark = pytest.mark.slow  # the first one compiles

ITEMS = [
    "One of the items that are looked for, with letters alone.",
    "se\u00f1or garc\u00eda y \u00e9l \u00e9l \u00e9l \u00e9l",
    "\u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2 \u03a3 \u03b1\u03a3 \u03b2 \u03b3 \u03b4",
]
NGRAMS = task_ngrams(ITEMS, 6, 8)
MATCHER, PREFILTER = Matcher(NGRAMS.keys()), Prefilter(NGRAMS)
SKIMMER = Skimmer(MATCHER, PREFILTER, "text", 10_000)

TEXTS = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from(
            [*ITEMS, *map(str.upper, ITEMS), *(one.replace(" ", "\n") for one in ITEMS)]
        ),
        st.sampled_from(["\u0130", "\u212a", "k", "_", "\\", '"', "\x7f", "\U0001f600"]),
    ),
    max_size=6,
).map(" ".join)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A document as JSON may spell it, sometimes with a wrong byte."""
    keys = st.one_of(st.sampled_from(["id", "origin", "split_id"]), st.text(max_size=3))
    more = draw(st.dictionaries(keys, VALUES, max_size=2))
    document = {**more, "text": draw(TEXTS)}
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " :\r")]))
    line = json.dumps(document, ensure_ascii=draw(st.booleans()), separators=separators)
    data = bytearray(line.encode(errors="surrogatepass"))
    if draw(st.integers(0, 2)) == 0:
        place = draw(st.integers(0, len(data) - 1))
        data[place : place + draw(st.integers(0, 2))] = draw(
            st.sampled_from([b"", b'"', b"\\", b"0", b"-", b".", b"e5", b"}", b"\xff", b"\xed\xa0"])
        )
    return bytes(data).replace(b"\n", b" ")


def check(block: bytes, skimmed: Skimmed) -> None:
    """Hold what was skimmed against the documents."""
    documents = [orjson.loads(line) for line in block.split(b"\n")]
    texts = [document["text"] for document in documents]
    assert all(isinstance(text, str) for text in texts)
    assert (skimmed.num_lines, skimmed.chars) == (len(texts), sum(map(len, texts)))
    assert skimmed.have_origin == {"origin" in document for document in documents}
    assert not any("split_id" in document for document in documents)
    assert all(texts[number] == text for number, text in skimmed.suspects.items())
    having = {number for number, text in enumerate(texts) if any(MATCHER.hits(text))}
    assert having <= set(skimmed.suspects) <= set(PREFILTER.suspects(texts))
    assert list(skimmed.suspects) == sorted(skimmed.suspects)


@settings(max_examples=400, deadline=None)
@given(st.lists(lines(), min_size=1, max_size=4).map(b"\n".join))
def test_what_is_skimmed_is_what_reading_gives(block: bytes) -> None:
    skimmed = SKIMMER.skim(block)
    if skimmed is not None:
        check(block, skimmed)


PLAIN = [
    b'{"text":""}',
    b'{"text": "a\\nb\\t\\"c\\" \\\\ \\/", "id": 7, "x": [1, -0.5, [], {}, true, false, null]}',
    b'{ "origin" : {"file": "a", "offset": 0} , "text" : "\\u00e9\\ud83d\\ude00 \xc3\xa9" }',
    '{"\u00e9": "\u4e2d\u6587", "text": "\u4e2d\u6587 \U0001f600"}'.encode(),
]
NOT_PLAIN = [
    b"",
    b"[]",
    b'{"text": 1}',
    b'{"x": "text"}',
    b'{"text": "a", "text": "b"}',
    b'{"text": "a", "\\u0074ext": "b"}',
    b'{"text": "a", "split_id": "x"}',
    b'{"text": "\\u0041"}',
    b'{"text": "\\ud800"}',
    b'{"text": "\xed\xa0\x80"}',
    b'{"text": "\xc0\x80"}',
    b'{"text": "a"} ',
    b'{"text": "a", "x": 1e5}',
    b'{"text": "a", "x": 01}',
    b'{"text": "a", "x": NaN}',
    b'{"text": "a",}',
    b'{"text": "a"',
    b'{"text": "' + b"a" * 10_000 + b'"}',
]


def test_plain_lines_are_taken_and_all_others_left() -> None:
    block = b"\n".join(PLAIN)
    skimmed = SKIMMER.skim(block)
    assert skimmed is not None
    assert skimmed.num_lines == len(PLAIN)
    check(block, Skimmed(skimmed.num_lines, skimmed.chars, skimmed.have_origin, skimmed.suspects))
    for line in NOT_PLAIN:
        assert SKIMMER.skim(line) is None, line
        assert SKIMMER.skim(b"\n".join([*PLAIN, line])) is None, line


def test_an_ngram_is_found_wherever_it_stands_in_a_large_block() -> None:
    rng = random.Random(3)
    for size in (10, 100, 3000):
        words = [
            [rng.choice(["w", "longer", "\u00e9t\u00e9", "k"]) for _ in range(300)]
            for _ in range(size)
        ]
        having = set(rng.sample(range(size), size // 10))
        for number in having:
            words[number].insert(rng.randrange(300), rng.choice(ITEMS))
        block = b"\n".join(orjson.dumps({"text": " \n".join(one)}) for one in words)
        skimmed = SKIMMER.skim(block)
        assert skimmed is not None
        assert set(skimmed.suspects) == having


@pytest.mark.parametrize("end", ["", " \u03a3"])
@pytest.mark.timeout(60)  # looking around each place takes an hour
def test_a_text_with_a_key_at_every_turn_is_searched_once(end: str) -> None:
    almost = ITEMS[0].replace("One", "Each").replace("alone", "only")
    for text, has in ((almost * 20_000 + end, False), (ITEMS[0] * 20_000 + end, True)):
        block = orjson.dumps({"text": text})
        skimmed = Skimmer(MATCHER, PREFILTER, "text", 1 << 26).skim(block)
        assert skimmed is not None
        assert has <= (0 in skimmed.suspects)


@pytest.mark.parametrize("key", ["text", "a key", "caf\u00e9"])
def test_a_key_that_needs_no_escape_suits(key: str) -> None:
    ascii_only = Prefilter(task_ngrams(["One of the items that are looked for."], 6, 8))
    assert ascii_only.is_of_bytes(key)
    assert not ascii_only.is_of_bytes(key + '"')
    assert not Prefilter({"k k k k k k": None}).is_of_bytes(key)
