"""Generates a MediaWiki dump: articles in wikitext, and what a collection must find.

    python -m trainyard.testing.wiki_dump OUT.xml.bz2 --articles 2000 --items items.jsonl

Planted and counted: redirects, disambiguation pages, talk and template pages, articles that nearly
repeat another, and articles that contain an item of an evaluation set. The same arguments give the
same bytes. The dump is multistream, as those of Wikimedia: a stream for the head, one for each
hundred pages, one for the end, and an index of `offset:id:title` beside it."""

from __future__ import annotations

import argparse
import bz2
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from trainyard.testing.wikitext import Writer

PAGES_A_STREAM = 100
FIRST_REVISION = 10_000

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <dbname>examplewiki</dbname>
    <base>https://example.org/wiki/Main_Page</base>
    <generator>MediaWiki 1.44</generator>
    <case>first-letter</case>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="1" case="first-letter">Talk</namespace>
      <namespace key="6" case="first-letter">File</namespace>
      <namespace key="10" case="first-letter">Template</namespace>
      <namespace key="14" case="first-letter">Category</namespace>
    </namespaces>
  </siteinfo>
"""
TAIL = "</mediawiki>\n"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to plant."""

    articles: int = 1000
    """Pages with text, near duplicates and leaks among them."""
    redirect_share: float = 0.3
    """Of each: pages for every article."""
    disambiguation_share: float = 0.03
    other_share: float = 0.05
    """Talk, template and category pages."""
    near_duplicate_share: float = 0.05
    """Of the articles."""
    leaked_share: float = 0.02
    """Of the articles."""
    items: int = 20
    """Items of the evaluation set that leaks."""
    words: int = 300
    """Of prose in an article, about."""
    seed: int = 1234


@dataclass(slots=True)
class Planted:
    """What the dump has, by page."""

    articles: int = 0
    redirects: int = 0
    disambiguations: int = 0
    others: int = 0
    xml_bytes: int = 0
    """After decompression."""
    near_duplicates: list[tuple[str, str]] = field(default_factory=list)
    """(title, title of the article that it repeats but for about one word in a hundred)."""
    leaked: list[tuple[str, int]] = field(default_factory=list)
    """(title, number of the evaluation item in its text)."""

    @property
    def pages(self) -> int:
        """All of them."""
        return self.articles + self.redirects + self.disambiguations + self.others


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the dump."""

    title: str
    text: str
    namespace: int = 0
    redirect: str = ""

    def xml(self, number: int) -> str:
        """As it stands in a dump. number: its id."""
        target = f'\n    <redirect title="{escape(self.redirect)}" />' if self.redirect else ""
        text = escape(self.text)
        size = len(self.text.encode())
        return f"""  <page>
    <title>{escape(self.title)}</title>
    <ns>{self.namespace}</ns>
    <id>{number}</id>{target}
    <revision>
      <id>{FIRST_REVISION + number}</id>
      <parentid>{number}</parentid>
      <timestamp>2026-11-01T00:00:00Z</timestamp>
      <contributor>
        <username>Example</username>
        <id>7</id>
      </contributor>
      <model>wikitext</model>
      <format>text/x-wiki</format>
      <text bytes="{size}" xml:space="preserve">{text}</text>
      <sha1>phoiac9h4m842xq45sp7s6u21eteeq1</sha1>
    </revision>
  </page>
"""


def evaluation_items(plan: Plan) -> list[str]:
    """The texts of the evaluation set that leaks; sentences of 20 words that no other page has."""
    writer = Writer(random.Random(f"items {plan.seed}"))
    return [f"{writer.name()} {writer.sentence(20)}" for _ in range(plan.items)]


def pages(plan: Plan, planted: Planted) -> Iterator[Page]:
    """The pages, in the order of their ids. planted: filled with what was yielded."""
    rng = random.Random(plan.seed)
    writer = Writer(rng)
    items = evaluation_items(plan)
    earlier: list[tuple[str, list[str]]] = []
    for number in range(plan.articles):
        title = f"{writer.name()} {number}"
        if earlier and rng.random() < plan.near_duplicate_share:
            original, paragraphs = rng.choice(earlier)
            paragraphs = [writer.nearly(text) for text in paragraphs]
            planted.near_duplicates.append((title, original))
        else:
            paragraphs = writer.paragraphs(plan.words)
            if len(earlier) < 1000:
                earlier.append((title, paragraphs))
            if items and rng.random() < plan.leaked_share:
                item = rng.randrange(len(items))
                paragraphs = [*paragraphs, items[item]]
                planted.leaked.append((title, item))
        planted.articles += 1
        yield Page(title, writer.article(title, paragraphs))
        yield from _beside(title, number, plan, planted, writer, rng)


def _beside(
    title: str, number: int, plan: Plan, planted: Planted, writer: Writer, rng: random.Random
) -> Iterator[Page]:
    """The pages that follow an article and are none."""
    if rng.random() < plan.redirect_share:
        planted.redirects += 1
        yield Page(f"{title} (old)", f"#REDIRECT [[{title}]]\n\n{{{{R from move}}}}", 0, title)
    if rng.random() < plan.disambiguation_share:
        planted.disambiguations += 1
        yield Page(f"{title} (disambiguation)", writer.disambiguation(title))
    if rng.random() < plan.other_share:
        planted.others += 1
        namespace, prefix = rng.choice([(1, "Talk"), (10, "Template"), (14, "Category")])
        yield Page(f"{prefix}:{title}", writer.sentence(12), namespace)


def write_dump(path: Path, plan: Plan, index: Path | None = None) -> Planted:
    """Write a dump: XML, or as multistream bzip2 if the name ends in .bz2. index: the file for the
    index of a multistream dump. Returns what is in it."""
    planted = Planted()
    lines: list[str] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:

        def put(text: str) -> None:
            data = text.encode()
            planted.xml_bytes += len(data)
            file.write(bz2.compress(data) if path.suffix == ".bz2" else data)

        put(HEAD)
        batch: list[str] = []
        for number, page in enumerate(pages(plan, planted), 1):
            batch.append(page.xml(number))
            lines.append(f"{file.tell()}:{number}:{page.title}\n")
            if len(batch) == PAGES_A_STREAM:
                put("".join(batch))
                batch.clear()
        if batch:
            put("".join(batch))
        put(TAIL)
    if index is not None:
        index.write_bytes(bz2.compress("".join(lines).encode()))
    return planted


def write_items(path: Path, items: Sequence[str]) -> None:
    """The evaluation set as JSONL, an object with `text` a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in items))


def main() -> None:
    """The command line; prints what was planted as JSON."""
    usual = Plan()
    parser = argparse.ArgumentParser(description="Write a MediaWiki dump in miniature.")
    parser.add_argument("output", type=Path, help="OUT.xml or OUT.xml.bz2")
    parser.add_argument("--articles", type=int, default=usual.articles)
    parser.add_argument("--words", type=int, default=usual.words, help="words in an article")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--index", type=Path, help="write the index of a multistream dump")
    parser.add_argument("--items", type=Path, help="write the evaluation set that leaks as JSONL")
    given = parser.parse_args()
    plan = Plan(articles=given.articles, words=given.words, seed=given.seed)
    planted = write_dump(given.output, plan, given.index)
    if given.items is not None:
        write_items(given.items, evaluation_items(plan))
    facts = asdict(planted)
    facts["near_duplicates"], facts["leaked"] = len(planted.near_duplicates), len(planted.leaked)
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
