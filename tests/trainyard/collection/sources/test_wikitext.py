"""Plain text of wikitext: cases by hand, laws on generated articles, and a parser beside it."""

from __future__ import annotations

import random
import time
from collections import Counter

import mwparserfromhell
import pytest

from trainyard.collection.sources import wikitext
from trainyard.collection.sources.wikitext import plain_text
from trainyard.testing.wikitext import Writer

CASES = {
    # emphasis and switches
    "'''Oslo''' is ''a'' '''''city'''''.": "Oslo is a city.",
    "__NOTOC__Oslo": "Oslo",
    # links
    "a [[b]] c": "a b c",
    "[[Paris, Texas|Paris]]ian": "Parisian",
    "[[:Category:Towns]] and [[Talk:x|y]]": "Category:Towns and y",
    "[[a| ]] [[ b ]]": "a b",
    "[https://example.org/x y z] [https://example.org/x]": "y z",
    "see https://example.org/a_b": "see https://example.org/a_b",
    "[1] and [sic]": "[1] and [sic]",
    "[[Category:Towns]][[File:a.jpg|thumb|a [[b|c]] {{d}} ''e'' [https://f g]]]x": "x",
    "[[Category:Towns|{{PAGENAME}}]]x": "x",
    # templates and parameters
    "a {{b|c={{d|{{e}}}}|f}} g": "a g",
    "10 {{convert|10|km}}, and": "10, and",
    "Oslo ({{IPA|x}}; {{lang|no|y}}) is": "Oslo is",
    "{{{1|default}}}x{{{{{a}}}}}y": "xy",
    "{{a [[b}} c": "c",
    "a {{b c": "a {{b c",
    "a }} b": "a }} b",
    # tables
    "a\n{| class=x\n! b\n|-\n| {{c}} || d\n|}\ne": "a\n\ne",
    "{|\n| a\n{|\n| b\n|}\n|}\nc": "c",
    ":{| \n| a\n|}\nb": "b",
    "a {| b |} c": "a {| b |} c",
    "{{Infobox\n| a = b\n|}}c": "c",
    "a\n{| never closed\n| b": "a",
    "<table><tr><td>a<table>b</table></td></tr></table>c": "c",
    # references and other elements
    'a<ref>b</ref><ref name="c" />d<ref name=e>{{f}}</ref>.': "ad.",
    "a<REF>b</REF>c": "ac",
    "a<!-- b -->c<!-- d": "ac",
    "x <math>a_{1}</math> y<gallery>\nA.jpg|b\n</gallery>": "x y",
    "H<sub>2</sub>O, <small>a</small><br />b": "H2O, a\nb",
    "<nowiki>''a'' [[b]]</nowiki> ''c''": "''a'' [[b]] c",
    "a<nowiki/>b": "ab",
    "1 < 2 and 3 > 2, <unknown>": "1 < 2 and 3 > 2, <unknown>",
    "a<includeonly>b</includeonly><noinclude>c</noinclude>": "ac",
    "a<ref>never closed": "anever closed",
    # entities
    "R&amp;D&nbsp;&ndash; &lt;b&gt; &#x41; AT&T &nosuch;": "R&D \u2013 <b> A AT&T &nosuch;",
    # lines
    "== A ==\nb\n=== C ===\n== D ==\n=== E ===\nf": "A\nb\n\nD\n\nE\nf",
    "a\n== References ==\n{{reflist}}": "a",
    "* a\n** b\n# c\n; d : e\n: f\n----\ng": "a\nb\nc\nd : e\nf\n\ng",
    "a\n\n\n\nb": "a\n\nb",
    "= b": "= b",
}


@pytest.mark.parametrize("given", CASES)
def test_cases_by_hand(given: str) -> None:
    assert plain_text(given) == CASES[given]


@pytest.mark.parametrize("given", CASES)
def test_the_fast_way_gives_what_the_tokens_give(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wikitext, "_without_simple", lambda text, prefixes: text)
    assert plain_text(given) == CASES[given]


def test_names_of_namespaces_in_another_language() -> None:
    german = frozenset({"datei", "kategorie"})
    assert plain_text("[[Datei:a.jpg|b]][[Kategorie:c]]d [[File:e]]", german) == "d File:e"


def articles(count: int) -> list[tuple[list[str], str]]:
    writer = Writer(random.Random(5))
    made = []
    for _ in range(count):
        paragraphs = writer.paragraphs(120)
        made.append((paragraphs, writer.article("Title", paragraphs)))
    return made


def test_the_words_of_paragraphs_stay_as_they_are() -> None:
    for paragraphs, article in articles(10):
        text = plain_text(article).replace(" \u2013", "")  # the writer adds dashes
        assert [part for part in paragraphs if part not in text] == []
        assert not set("{}[]<>|=") & set(text)


def test_plain_text_stays_plain() -> None:
    for _, article in articles(5):
        text = plain_text(article)
        assert plain_text(text) == text


def test_words_agree_with_a_parser() -> None:
    """mwparserfromhell, without what it counts as text and we do not: tables, files, categories,
    and headings without text."""
    shared = total = 0
    for _, article in articles(8):
        code = mwparserfromhell.parse(article)
        for tag in code.filter_tags(matches=lambda node: node.tag in ("table", "ref")):
            code.remove(tag)
        for link in code.filter_wikilinks(recursive=False):
            if str(link.title).startswith(("File:", "Category:")):
                code.remove(link)
        theirs = Counter(code.strip_code().split())
        ours = Counter(plain_text(article).split())
        shared += (ours & theirs).total()
        total += (ours | theirs).total()
    assert shared / total > 0.98


OPENING = [
    "{{",
    "[[",
    "{|\n",
    "[https://a ",
    "<ref>",
    "<div>",
    "<table>",
    "'''",
    "<!--",
    "{{{",
    "=",
]
CLOSING = ["", "}}", "]]", "\n|}", "]", "</ref>", "</table>", "-->"]


def seconds_for(text: str) -> float:
    began = time.process_time()
    plain_text(text)
    return time.process_time() - began


@pytest.mark.slow
@pytest.mark.parametrize("opening", OPENING)
def test_time_is_linear_in_hostile_text(opening: str) -> None:
    """Eight times the text takes less than 30 times as long, where a square takes 64 times."""
    for closing in CLOSING:
        for few, many in (
            (opening * 1000 + closing * 1000, opening * 8000 + closing * 8000),
            (f"{opening}\n{closing}" * 1000, f"{opening}\n{closing}" * 8000),
        ):
            assert seconds_for(many) < 30 * max(seconds_for(few), 0.002)
