"""The plain text of wikitext: templates, tables, references, files and categories go, the text of
links stays.

One pass over the markup with a stack of what is open, in time linear in the text whatever its
author wrote. Templates are not expanded. Rules: MediaWiki's help pages on formatting, links and
tables. Knows nothing of dumps."""

from __future__ import annotations

import html
import re
from functools import cache

PREFIXES = frozenset({"category", "file", "image", "media"})
"""Names of namespaces that every wiki knows."""

TOKEN = re.compile(
    r"\{\{\{(?!\{)|\{\{|\}\}"
    r"|\[\[|\]\]|\[(?=https?:|ftp:|mailto:|//)|\]"
    r"|<(/?)([A-Za-z][A-Za-z0-9]*)((?:[^<>A-Za-z0-9][^<>]*)?)>"
    r"|\{\||\|\}(?!\})"
)
"""What opens or closes something: a template or parameter, a link, a tag, a table."""

SIMPLE_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}(?!\})")
SIMPLE_TABLE = re.compile(r"\n\{\|[^{}]*\n\|\}(?!\})")
SIMPLE_REFERENCE = re.compile(r"<ref(?: [^<>]*)?(?:/>|(?<!/)>[^<>]*</ref>)")
SIMPLE_LINK = re.compile(r"\[\[(?:[^][{}<>|:\n]*+\|(?! *\]))?([^][{}<>|:\n]++)\]\]")
SIMPLE_EXTERNAL = re.compile(r"\[https?:[^][{}<>\s]*+ ++([^][{}<>\n]*+)\]")
"""What has nothing within it: most of the markup, and several times as fast as by tokens."""
SIMPLE_PASSES = 2
"""Templates within templates are removed this deep."""
GONE = "\0"
"""In the place of a template; no text of an XML document has it."""
CLINGING = ",.;:)"
"""A blank between a template and these goes with the template."""

COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
SWITCH = re.compile(r"__[A-Z]{3,20}__")
ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});")
EMPTY_PARENTHESES = re.compile(r"\([,;: \t]*\)")

RAW = {"nowiki": True, "pre": True}
"""Elements whose content is no markup, and whether it is text."""
NOT_TEXT = """ce chem gallery graph hiero imagemap indicator inputbox mapframe maplink math ref
references score source syntaxhighlight templatedata templatestyles timeline"""
RAW |= dict.fromkeys(NOT_TEXT.split(), False)
RAW_TEXT = re.compile("<(?:nowiki|pre)", re.IGNORECASE)
CLOSING = {name: re.compile(rf"</{name}[ \t\n]*>", re.IGNORECASE) for name in RAW}

DROPPED = frozenset({"includeonly", "script", "style", "table"})
"""Elements that go with their content, which is markup and may have such an element in it."""

WITH_TEXT = """abbr b bdi bdo big blockquote br caption center cite code data dd del dfn div dl dt
em font h1 h2 h3 h4 h5 h6 hr i img ins kbd li link mark meta noinclude ol onlyinclude p poem q rb rp
rt rtc ruby s samp section small span strike strong sub sup td th time tr tt u ul var wbr"""
KEPT = frozenset(WITH_TEXT.split())
"""Elements of which only the tags go; of any other name, `<` is text."""

BREAKS = frozenset({"br", "hr", "p", "div", "li", "tr", "dd", "dt", "blockquote"})

LINE_MARKS = "*#:; \t"
MOST_INDENT = 40
"""Blanks and colons before a table."""
MOST_LINKS = 8
"""Links within links, as in the caption of a file; more are text."""

MARKS = "'=*#:;_&-([ "
HIDDEN = {ord(mark): 0xF0000 + ord(mark) for mark in MARKS}
SHOWN = {hidden: mark for mark, hidden in HIDDEN.items()}
"""Marks in `nowiki` are hidden from the passes after the first, in a private use area."""


def plain_text(wikitext: str, dropped_prefixes: frozenset[str] = PREFIXES) -> str:
    """The text, a paragraph or list item a line, with headings of sections that have text.

    dropped_prefixes: names of the namespaces of files and categories in the language of the wiki,
    lower case; a link to one is no text."""
    if "<!--" in wikitext:
        wikitext = COMMENT.sub("", wikitext)
    has_raw_text = RAW_TEXT.search(wikitext) is not None
    if not has_raw_text:
        wikitext = _without_simple(wikitext, dropped_prefixes)
    text = _Stripper(wikitext, dropped_prefixes).run()
    text = text.replace("'''", "").replace("''", "")
    if "__" in text:
        text = SWITCH.sub("", text)
    text = _lines(text)
    if "&" in text:
        text = ENTITY.sub(lambda found: html.unescape(found[0]).replace("\u00a0", " "), text)
    return text.translate(SHOWN) if has_raw_text else text


@cache
def simple_dropped(prefixes: frozenset[str]) -> re.Pattern[str]:
    """Links to files and categories; those in captions are text by then."""
    names = "|".join(map(re.escape, sorted(prefixes)))
    return re.compile(rf"\[\[ *(?:{names}) *:[^][{{}}<>]*\]\]", re.IGNORECASE)


def _without_simple(text: str, prefixes: frozenset[str]) -> str:
    for _ in range(SIMPLE_PASSES):
        text = SIMPLE_TEMPLATE.sub(GONE, text)
    for mark in CLINGING:
        text = text.replace(f" {GONE}{mark}", mark)
    text = SIMPLE_REFERENCE.sub("", SIMPLE_TABLE.sub("\n", text.replace(GONE, "")))
    text = SIMPLE_EXTERNAL.sub(r"\1", SIMPLE_LINK.sub(r"\1", text))
    return simple_dropped(prefixes).sub("", text)


class _Stripper:
    """The first pass. `out` has the pieces of text so far; what is open is on a stack, with the
    place in `out` where it began, so that closing it replaces or removes its pieces."""

    def __init__(self, text: str, dropped_prefixes: frozenset[str]) -> None:
        self._text, self._prefixes = text, dropped_prefixes
        self._out: list[str] = []
        self._open: list[tuple[str, int]] = []
        self._counts: dict[str, int] = {}
        self._unclosed: set[str] = set()
        """Raw elements that are not closed from here on."""

    def run(self) -> str:
        """The text without what is dropped."""
        text, out, search, at = self._text, self._out, TOKEN.search, 0
        while found := search(text, at):
            begin, end = found.span()
            if begin > at:
                out.append(text[at:begin])
            at = self._take(found, begin, end)
        out.append(text[at:])
        table = next((place for kind, place in self._open if kind in ("{|", "table")), None)
        return "".join(out if table is None else out[:table])

    def _take(self, found: re.Match[str], begin: int, end: int) -> int:
        """Handle a token; returns the position after it."""
        token = found[0]
        if found[2] is not None:
            return self._tag(found, end)
        if token in ("{{", "{{{", "["):
            self._push(token, token)
        elif token == "[[":
            if self._counts.get("[[", 0) >= MOST_LINKS:
                self._out.append(token)
            else:
                self._push(token, token)
        elif token == "}}":
            return self._end_template(end)
        elif token == "]]":
            if self._open and self._open[-1][0] == "[":  # ] closes the link, ]] what is around it
                self._end_external()
                return begin + 1
            self._end_link()
        elif token == "]":
            self._end_external()
        elif not self._begins_line(begin):
            self._out.append(token)
        elif token == "{|":
            self._push("{|", "")
        else:
            self._end_table("{|", token)
        return end

    def _begins_line(self, at: int) -> bool:
        """Whether a mark of a table stands where one can."""
        before = self._text[max(0, at - MOST_INDENT) : at].rstrip(" \t:")
        return before.endswith("\n") or (not before and at < MOST_INDENT)

    def _push(self, kind: str, piece: str) -> None:
        self._open.append((kind, len(self._out)))
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._out.append(piece)

    def _pop_to(self, *kinds: str) -> tuple[str, int]:
        """Forget what is open within the innermost of these kinds, and it."""
        while True:
            kind, place = self._open.pop()
            self._counts[kind] -= 1
            if kind in kinds:
                return kind, place

    def _end_template(self, end: int) -> int:
        if not (self._counts.get("{{") or self._counts.get("{{{")):
            self._out.append("}}")
            return end
        kind, place = self._pop_to("{{", "{{{")
        del self._out[place:]
        if kind == "{{{" and self._text[end : end + 1] == "}":
            end += 1
        if self._out and self._out[-1][-1:] == " " and self._text[end : end + 1] in CLINGING:
            self._out[-1] = self._out[-1][:-1]
        return end

    def _end_table(self, kind: str, literal: str) -> None:
        if self._counts.get(kind):
            _, place = self._pop_to(kind)
            del self._out[place:]
        else:
            self._out.append(literal)

    def _end_link(self) -> None:
        if not self._open or self._open[-1][0] != "[[":
            self._out.append("]]")
            return
        _, place = self._pop_to("[[")
        content = "".join(self._out[place + 1 :])
        del self._out[place:]
        target, piped, label = content.partition("|")
        prefix, colon, _ = target.partition(":")
        if colon and prefix.strip().lower() in self._prefixes:
            return
        self._out.append(label if piped and label.strip() else target.strip().removeprefix(":"))

    def _end_external(self) -> None:
        if not self._open or self._open[-1][0] != "[":
            self._out.append("]")
            return
        _, place = self._pop_to("[")
        content = "".join(self._out[place + 1 :])
        del self._out[place:]
        if "\n" in content:
            self._out.append(f"[{content}]")
        else:
            self._out.append(content.partition(" ")[2].strip())

    def _tag(self, found: re.Match[str], end: int) -> int:
        name = found[2].lower()
        if name in RAW:
            return end if found[1] or found[3].endswith("/") else self._raw(name, end)
        if name in DROPPED:
            if found[1]:
                self._end_table(name, "")
            elif not found[3].endswith("/"):
                self._push(name, "")
        elif name not in KEPT:
            self._out.append(found[0])
        elif name in BREAKS:
            self._out.append("\n")
        return end

    def _raw(self, name: str, end: int) -> int:
        """Skip the content of an element, or take it as text."""
        found = None if name in self._unclosed else CLOSING[name].search(self._text, end)
        if found is None:
            self._unclosed.add(name)
            return end
        if RAW[name]:
            self._out.append(self._text[end : found.start()].translate(HIDDEN))
        return found.end()


def _lines(text: str) -> str:
    """The lines without marks of lists and headings; a heading only if text follows."""
    kept: list[str] = []
    headings: list[tuple[int, str]] = []
    for line in text.split("\n"):
        line = line.strip()
        if line[:1] == "=" and (level := _level(line)):
            while headings and headings[-1][0] >= level:
                headings.pop()
            headings.append((level, line[level:-level].strip()))
            continue
        if "(" in line:
            line = EMPTY_PARENTHESES.sub("", line)
        if line[:4] == "----":
            line = line.lstrip("-")
        line = " ".join(line.lstrip(LINE_MARKS).split())
        if not line:
            if kept and kept[-1]:
                kept.append("")
            continue
        for _, title in headings:
            if title:
                kept += [title] if not kept or not kept[-1] else ["", title]
        headings.clear()
        kept.append(line)
    return "\n".join(kept).strip()


def _level(line: str) -> int:
    """Of a heading; 0 if the line is none."""
    opening = len(line) - len(line.lstrip("="))
    closing = len(line) - len(line.rstrip("="))
    return 0 if opening == len(line) else min(opening, closing, 6)
