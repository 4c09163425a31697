"""Documents from the pages of MediaWiki dumps: articles as plain text; all else with its reason."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from trainyard.collection.sources.found import BAD_RECORD, EMPTY, TEXT, TOO_LARGE, Found
from trainyard.collection.sources.wiki_dump import PageError, RawPage, Site, parse_page, raw_pages
from trainyard.collection.sources.wikitext import plain_text
from trainyard.corpus.formats.records import ByteRange

NAMESPACE, REDIRECT, DISAMBIGUATION = "namespace", "redirect", "disambiguation"

REASONS = (NAMESPACE, REDIRECT, DISAMBIGUATION, EMPTY, TOO_LARGE, BAD_RECORD)
"""In the order in which they apply."""


def wiki_documents(
    source: ByteRange,
    compression: str,
    name: str,
    site: Site,
    namespaces: Collection[int],
    max_bytes: int,
) -> Iterator[Found]:
    """The pages of a range. name: of the file, for their places."""
    wanted = {str(number) for number in namespaces}
    for page in raw_pages(source, compression, name, max_bytes):
        yield _found(page, site, wanted, max_bytes)


def _found(raw: RawPage, site: Site, namespaces: Collection[str], max_bytes: int) -> Found:
    if not raw.is_whole:
        return Found(raw.place, {}, TOO_LARGE, f"the page has more than {max_bytes} bytes")
    try:
        page = parse_page(raw.data)
    except PageError as error:
        return Found(raw.place, {}, BAD_RECORD, str(error))
    fields = {
        "id": page.id,
        "title": page.title,
        "url": site.page_url(page.title),
        "revision": page.revision,
        "timestamp": page.timestamp,
    }
    if page.namespace not in namespaces:
        return Found(raw.place, fields, NAMESPACE, f"namespace {page.namespace}")
    if page.redirect is not None:
        return Found(raw.place, fields, REDIRECT, f"to {page.redirect}")
    if page.is_disambiguation:
        return Found(raw.place, fields, DISAMBIGUATION, "it lists the meanings of a name")
    text = plain_text(page.text, site.prefixes)
    if not text:
        return Found(raw.place, fields, EMPTY, "no text is left without markup")
    return Found(raw.place, {**fields, TEXT: text})
