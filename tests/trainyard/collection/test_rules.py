"""Rules on texts whose answer the publication, or upstream's code, gives by hand."""

from __future__ import annotations

import inspect
import random
import unicodedata
from typing import Literal

import ftfy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.collection.rules.build import MODULES, build_rule
from trainyard.collection.rules.form import fixed, in_order, normalized
from trainyard.collection.rules.page import Drop, Edit, Page
from trainyard.collection.rules.table import (
    PARAMETERS,
    PRESETS,
    RULES,
    named,
    parse_rule,
)
from trainyard.errors import ConfigError

PROSE = (
    "The yard opens before dawn and the first trains of the day have to be sorted by then. "
    "Every wagon that arrives is weighed with care, and its papers are read by two people. "
    "After that it waits on a siding until the engine of its new train has come for it."
)
LONG = f"""{PROSE}
Nobody would have thought that this could work at all, but it does so on most days. Clerks write the
numbers of the wagons into a book, which a courier brings to the office at the end of each week.
In winter, snow covers the rails, and the men who sweep them are out there through the night."""


def verdict(rule: str, text: str, tokens: int = 0) -> Drop | Edit | None:
    return build_rule(parse_rule(rule)).apply(Page(text, lambda _: tokens))


def why(rule: str, text: str, tokens: int = 0) -> str:
    found = verdict(rule, text, tokens)
    assert isinstance(found, Drop), found
    return found.why


def text_after(rule: str, text: str) -> str:
    found = verdict(rule, text)
    assert not isinstance(found, Drop), found
    return text if found is None else found.text


# --- form -------------------------------------------------------------------------------------

PIECES = ["a", " ", "\n", "\r\n", "&amp;", "&eacute", "<", "\u00e2\u20ac\u2122", "\u201cq\u201d"]
PIECES += ["\x1b[31m", "\ufb01", "\uff21", "e\u0301", "\u2028", "\x85", "\xa0", "\x00", "\t"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_the_fast_path_of_fix_text_is_ftfy(text: str) -> None:
    assert fixed(text) == ftfy.fix_text(text)


@pytest.mark.slow
def test_a_line_longer_than_a_segment_of_ftfy_is_cut_as_ftfy_cuts_it() -> None:
    text = "x" * 999_998 + "\u00e2\u20ac\u2122" + "y\nshort"
    assert fixed(text) == ftfy.fix_text(text)


def test_normal_forms() -> None:
    assert text_after("nfc", "e\u0301\ufb01") == "\u00e9\ufb01"
    assert text_after("nfkc", "e\u0301\ufb01") == "\u00e9fi"


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_normal_forms_of_long_runs_of_marks_are_pythons(form: Literal["NFC", "NFKC"]) -> None:
    """U+0344 and U+0F73 are marks that become two; U+0F73 is of class 0 itself."""
    rng = random.Random(0)
    marks = [*"\u0301\u0323\u0316\u0344\u0f73\u0f71\u034f\u2260", *"\u0301\u0323" * 20, "a"]
    for _ in range(50):
        text = "".join(rng.choices(marks, k=300))
        assert normalized(form, text) == unicodedata.normalize(form, text)


@pytest.mark.parametrize("rule", ["nfc", "nfkc", "fix_text"])
@pytest.mark.parametrize("marks", ["\u0301\u0323", "\u0f73"])
def test_marks_in_a_row_take_no_square_of_their_number(rule: str, marks: str) -> None:
    """In order, they are sorted at once; Python sorts by insertion."""
    many = in_order(marks * 200)
    classes = [unicodedata.combining(mark) for mark in many]
    assert classes == sorted(classes)
    assert text_after(rule, marks * 200) == unicodedata.normalize("NFC", marks * 200)


def test_general_cleaning_is_the_expression_of_upstream() -> None:
    # A line feed after a word goes; one after a full stop stays.
    assert text_after("general_cleaning", "a  b\n\nc.\nd\n e") == "a b c.\nd e"


def test_blank_lines_and_blanks_at_ends_go() -> None:
    assert text_after("blank_lines", "\n\na \n\n\n\nb\t\n") == "a\n\nb"
    assert text_after("blank_lines:most=0", "a\n\n\nb") == "a\nb"


@pytest.mark.parametrize(
    ("rule", "kept", "dropped"),
    [
        ("min_chars", "x" * 512, "x" * 511),
        ("max_chars:limit=5", "x" * 5, "x" * 6),
        ("min_words:limit=3", "a b c", "a b"),
        ("javascript_notice", "x" * 256 + "JavaScript", "Enable JavaScript"),
    ],
)
def test_lengths_at_their_limits(rule: str, kept: str, dropped: str) -> None:
    assert verdict(rule, kept) is None
    assert isinstance(verdict(rule, dropped), Drop)


def test_tokens_are_counted_only_below_1024_characters() -> None:
    assert why("min_tokens", "x" * 1023, tokens=127) == "127 tokens"
    assert verdict("min_tokens", "x" * 1023, tokens=128) is None
    assert verdict("min_tokens", "x" * 1024, tokens=1) is None


# --- language ---------------------------------------------------------------------------------

GERMAN = (
    "Der Bahnhof wird vor dem Morgengrauen ge\u00f6ffnet, und die ersten Z\u00fcge warten schon."
)


@pytest.mark.slow
def test_languages_are_kept_by_name() -> None:
    assert verdict("language", PROSE) is None
    assert why("language", GERMAN).startswith("de ")
    assert verdict("language:keep=en+de", GERMAN) is None
    assert why("short_foreign", GERMAN) == "de"
    assert verdict("short_foreign", GERMAN * 8) is None  # 512 characters or more


# --- script -----------------------------------------------------------------------------------

HINDI = "\u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902"
GREEK = "\u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1"


def test_scripts_are_kept_by_the_share_of_letters() -> None:
    assert verdict("script", PROSE) is None
    assert why("script", HINDI) == "0% Latin"
    assert verdict("script:keep=Devanagari", HINDI) is None
    assert why("script:keep=Greek,min=0.9", GREEK + "ab") == "80% Greek"
    assert verdict("script:keep=Greek+Latin,min=1", GREEK + "ab") is None
    assert why("script", "12 + 30 = 42") == "no letter"


# --- Gopher -----------------------------------------------------------------------------------


def test_gopher_keeps_prose() -> None:
    assert verdict("gopher_quality", PROSE) is None
    assert verdict("gopher_repetition", PROSE) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("the and " * 24, "48 words"),
        ("be to of a " * 20, "words of 1.8 characters"),
        ("uncharacteristically to the " * 20 + "w" * 900, "words of "),
        (PROSE + " #" * 12, "# a word"),
        (PROSE + " \u2026" * 12, "ellipses a word"),
        ("\n".join("- " + line for line in [PROSE[:60]] * 10), "begin with a bullet"),
        ("\n".join([PROSE[:85], PROSE[:85] + "...", PROSE]), "end with an ellipsis"),
        (PROSE + " 1234" * 20, "of words have a letter"),
        ("lorem dolor amet " * 20, "0 stop words"),
    ],
)
def test_gopher_quality_drops(text: str, reason: str) -> None:
    assert reason in why("gopher_quality", text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{PROSE}\n\n{PROSE}", "50% of paragraphs"),
        (PROSE + "\na\na\na\na", "60% of lines"),
        (f"{PROSE}\nx\ny\n{PROSE}\nz\nw", "characters are in repeated lines"),
        ("to be " * 30 + PROSE, "one 2-gram has"),
    ],
)
def test_gopher_repetition_drops(text: str, reason: str) -> None:
    assert reason in why("gopher_repetition", text)


def test_repeated_ngrams_count_each_character_once() -> None:
    """24 words twice: the second 24 are repeats; each shorter n-gram has little of the text."""
    words = " ".join(f"word{i:02}" for i in range(24))
    text = f"{words} {words} {' '.join(f'other{i:02}' for i in range(50))}"
    share = len(words) / len(text)
    assert why("gopher_repetition", text) == f"repeated 5-grams have {share:.0%} of the characters"
    assert verdict("gopher_repetition:scale=3", text) is None


# --- C4 and FineWeb ---------------------------------------------------------------------------


def test_c4_keeps_lines_that_end_in_a_mark_and_have_five_words() -> None:
    text = "\n".join(
        [
            "Home | About | Contact and more",
            "One two three four five.",
            "Too few words.",
            "It goes on and on and on...",
            'She said "a line may end so"',
            "Please enable Javascript to see this page.",
            "We use cookies to make this page better.",
            "A fact is told here.[1][citation needed]",
        ]
    )
    found = verdict("c4", text)
    assert isinstance(found, Edit)
    assert found.text == (
        'One two three four five.\nShe said "a line may end so"\nA fact is told here.'
    )
    assert len(found.removed) == 5


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("This is lorem ipsum text to fill.", "lorem ipsum"),
        ("function of a page { is not text.", "a curly bracket"),
        ("One line is not quite enough.", "1 sentences"),
    ],
)
def test_c4_drops_pages(line: str, reason: str) -> None:
    assert why("c4", line) == reason


def test_a_page_of_javascript_is_not_dropped_for_its_bracket() -> None:
    """The code of C4 skips such a line before it looks for brackets."""
    assert text_after("c4:min_sentences=0", "this javascript has a { inside.") == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a heading of a page without any mark at all\n" * 10, "0% of lines end in punctuation"),
        ("short.\nbrief.\ntiny.\n" + PROSE, "75% of lines have at most 30"),
        (f"{PROSE}\n{PROSE}\n", "50% of characters are in repeated lines"),
        (
            "An extraordinarily long word here.\n\n\nAnother uncharacteristically long one.",
            "a word",
        ),
    ],
)
def test_fineweb_drops(text: str, reason: str) -> None:
    assert reason in why("fineweb", text)


def test_fineweb_keeps_prose() -> None:
    assert verdict("fineweb", PROSE) is None


# --- personal data ----------------------------------------------------------------------------


def test_personal_data_is_masked_and_what_looks_alike_stays() -> None:
    mail = "Write to jane.doe+x@mail.example.org, not to me@home or @you."
    assert text_after("mask_emails", mail) == "Write to <EMAIL>, not to me@home or @you."
    addresses = "8.8.8.8 and 10.0.0.1, 300.1.1.1, version 1.2.3.4.5"
    assert text_after("mask_ips", addresses) == addresses.replace("8.8.8.8", "<IP>")
    phones = "Call +49 30 1234 5678 or (030) 123-4567; in 1999-2001 it was 12 trains."
    assert text_after("mask_phones", phones) == (
        "Call <PHONE> or <PHONE>; in 1999-2001 it was 12 trains."
    )


# --- the table --------------------------------------------------------------------------------


def test_every_rule_is_built_with_its_published_limits_and_says_where_it_is_from() -> None:
    for name in RULES:
        rule = build_rule(parse_rule(name))
        assert rule.apply.__doc__, name
        assert not isinstance(rule.apply(Page(LONG, lambda _: 200)), Drop), name


def test_the_preset_openwebtext_is_upstreams_order() -> None:
    assert [parse_rule(rule).name for rule in PRESETS["openwebtext"]] == [
        *("fix_text", "language", "min_tokens"),  # cleanup_dataset.py
        *("min_chars", "javascript_notice", "short_foreign", "fix_text"),  # cleanup_fix_dataset.py
    ]
    names = named([parse_rule(rule) for rule in PRESETS["openwebtext"]])
    assert len(set(names)) == len(names)


def test_the_parameters_in_the_table_are_those_of_the_functions() -> None:
    for name, module in RULES.items():
        signature = inspect.signature(getattr(MODULES[module], name))
        own = list(signature.parameters.values())[1:]
        assert PARAMETERS.get(name, {}) == {one.name: type(one.default) for one in own}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("gopher_qualty", "did you mean 'gopher_quality'"),
        ("min_chars:200", "'200' is not KEY=VALUE"),
        ("min_chars:", "'' is not KEY=VALUE"),
        ("min_chars:least=200", "min_chars has no 'least', only limit"),
        ("min_chars:limt=200", "min_chars has no 'limt'; did you mean 'limit'"),
        ("nfc:x=1", "no parameter at all"),
        ("min_chars:limit=1.5", "limit is a whole number, not '1.5'"),
        ("language:min=nan", "min must not be negative or infinite"),
        ("c4:end_marks=no", "end_marks is true or false, not 'no'"),
        ("language:min=65", "min is at most 1, and not 65"),
        ("script:min=65", "min is at most 1, and not 65"),
        ("script:keep=Latin+Klingon", "Unicode has no script 'Klingon'"),
        ("script:keep=La]tin", "Unicode has no script"),
        ("language:keep=xx", "py3langid has no language 'xx'"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(rule: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_rule(parse_rule(rule))
