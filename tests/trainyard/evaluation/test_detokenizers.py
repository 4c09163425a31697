"""The detokeniser on lines made for its rules, and on WikiText itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.errors import ConfigError
from trainyard.evaluation.config import EvaluationConfig
from trainyard.evaluation.detokenizers import DETOKENIZERS, detokenize_wikitext


@pytest.mark.parametrize(
    ("tokenised", "plain"),
    [
        ("the dogs ' bones", "the dogs' bones"),
        ("well @-@ known , 1 @,@ 234 @.@ 5 km", "well-known, 1,234.5 km"),
        ("one ; two : three . Four ! Five ? Six", "one; two: three. Four! Five? Six"),
        ("( 24 in ) [ sic ] { a }", "(24 in) [sic] {a}"),
        ('becoming " lobster red " on cooking', 'becoming "lobster red" on cooking'),
        ("she said ' no ' twice", "she said 'no' twice"),
        ("= Title =", "= Title ="),
        ("= = Section = =", "== Section =="),
        ("= = = Part = = =", "=== Part ==="),
        ("= = = = Piece = = = =", "==== Piece ===="),
        ("20 \N{DEGREE SIGN} C", "20\N{DEGREE SIGN}C"),
        (" a line \n another \n", " a line\nanother\n"),
        ("about N people", "about 1 people"),
        ("Britain 's coast", "Britain's coast"),
    ],
)
def test_each_rule_gives_plain_text(tokenised: str, plain: str) -> None:
    assert detokenize_wikitext(tokenised) == plain


def test_the_detokeniser_is_chosen_by_file_name_or_option() -> None:
    config = EvaluationConfig(task="WIKITEXT103")
    for path in ("/data/wikitext-103/valid.txt", "wiki.test.tokens", "s3://b/x/wiki.txt"):
        assert config.for_files((path,)).detokenizer == "wikitext"
    for path in ("s3://bucket/heldout.txt", "/home/wikitor/corpus/heldout.txt"):
        assert config.for_files((path,)).detokenizer == "none"
    assert config.for_files(("ptb/valid.txt",)).detokenizer == "ptb"
    with pytest.raises(ConfigError, match=r"--detokenizer auto: by their names, wiki\.txt is"):
        config.for_files(("wiki.txt", "held.txt"))
    by_hand = EvaluationConfig(task="WIKITEXT103", detokenizer="none")
    assert by_hand.for_files(("wiki.txt",)) == by_hand
    assert DETOKENIZERS["none"]("a , b") == "a , b"
    assert DETOKENIZERS["wikitext"]("a , b") == "a, b"
    assert DETOKENIZERS["ptb"]("it 's N more \n they do n't") == "it's1 more\nthey don't"


@pytest.mark.parametrize("split", ["valid", "test"])
def test_wikitext_103_reads_as_plain_text(shared: Path, split: str) -> None:
    path = shared / "data" / "corpora" / "wikitext-103" / f"wiki.{split}.tokens"
    text = path.read_text(encoding="utf-8")
    plain = detokenize_wikitext(text)
    assert 0.9 * len(text) < len(plain) < len(text)
    for mark in (" @-@ ", " @,@ ", " @.@ ", " , ", " ; ", " \n", "\n ", "= =", " 's"):
        assert mark not in plain, mark
    assert sum(map(str.isalnum, plain)) == sum(map(str.isalnum, text))
