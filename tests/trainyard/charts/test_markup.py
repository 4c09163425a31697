"""Elements escape what is not markup."""

from __future__ import annotations

from trainyard.charts.markup import Markup, element, join


def test_elements_escape_plain_text() -> None:
    assert element("a", "<", title='"') == '<a title="&quot;">&lt;</a>'
    assert element("p", element("b", "x"), None, Markup("&amp;")) == "<p><b>x</b>&amp;</p>"
    rect = element("rect", x=1.5, rx=2.0, class_="c", fill=None)
    assert rect == '<rect x="1.5" rx="2" class="c"/>'


def test_characters_that_cannot_be_encoded_or_reorder_text_are_escaped() -> None:
    assert join(["a\0", "\ud800", "b\u202e"]) == r"a\x00\ud800b\u202e"
    kept = "1\u202f000 \u0645\u06cc\u200c\u062e \u3000 \u05d0\n\t"
    assert join([kept]) == kept
