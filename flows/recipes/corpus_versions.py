"""Versions of a corpus, of tokens or of documents: their sources, their documents, their pointer.

A version never changes; `current.json` under the root of a recipe is the document of the newest
one. No Prefect here."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from flows.recipes.recipe import Recipe
from trainyard import json_text
from trainyard.artifacts import conditional, store
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import Manifests, resolve
from trainyard.artifacts.urls import basename
from trainyard.config import from_table
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError

FORMAT_VERSION = 1
CURRENT = "current.json"
SHORT, LONG = 12, 24
"""Digits of digests in names: of options and versions, of sources."""


@dataclass(frozen=True, slots=True)
class CorpusObject:
    """One object of the corpus, as it is now."""

    url: str
    digest: str
    part: str
    """What was made of it alone: the prefix of its tokens, or a folder of documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusVersion:
    """A complete, immutable version of the corpus."""

    version: str
    number: int
    """From 1."""
    options_digest: str
    """Digest of all options that affect tokens or documents."""
    tokens: dict[str, str]
    """Prefix of each pair, by the JSON key of its text; none of a version of documents."""
    sources: tuple[CorpusObject, ...]
    documents: tuple[str, ...] = ()
    """Patterns of its documents, if it is one of documents."""
    datasheet: str = ""
    """Prefix of the datasheet of these documents."""
    added: tuple[str, ...] = ()
    """URLs of sources with contents that the previous version did not have."""
    removed: tuple[str, ...] = ()
    """URLs that only the previous version has."""
    previous: str | None = None
    published: str = ""
    announced: bool = False
    """Whether a server has the event. If not, such as after a kill, the next run sends it."""
    format_version: int = field(default=FORMAT_VERSION)

    def encode(self) -> bytes:
        """The document."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def read_pointer(url: str) -> tuple[CorpusVersion, str] | None:
    """The version that a pointer names, and the version of its file; None if there is none."""
    found = conditional.read_version(url)
    if found is None:
        return None
    try:
        document = json_text.loads(found[0])
        if document["format_version"] > FORMAT_VERSION:
            raise ArtifactError(
                f"{url}: format {document['format_version']} is newer than {FORMAT_VERSION}, the "
                f"newest this version of trainyard reads; upgrade trainyard"
            )
        return from_table(CorpusVersion, document, url), found[1]
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{url}: not a pointer to a corpus version ({error!r})") from error


def expand(patterns: Sequence[str]) -> list[str]:
    """The files that the patterns of a corpus name, each once; a pointer to a version of documents
    stands for its documents."""
    found: list[str] = []
    for pattern in patterns:
        for one in documents_of(pattern):
            found += store.expand(one)
    return list(dict.fromkeys(found))


def datasheets(patterns: Sequence[str]) -> dict[str, list[str]]:
    """The option of the run card that names the datasheets of the corpora among the patterns."""
    pointers = [read_pointer(one) for one in patterns if basename(one) == CURRENT]
    found = [one[0].datasheet for one in pointers if one is not None and one[0].datasheet]
    return {"datasheets": found} if found else {}


def documents_of(place: str) -> tuple[str, ...]:
    """The patterns of the documents of a pointer's newest version; of another place, itself."""
    if basename(place) != CURRENT:
        return (place,)
    found = read_pointer(place)
    if found is None:
        raise ArtifactError(
            f"{place}: does not exist; run the flow collect-corpus on that recipe first"
        )
    if not found[0].documents:
        raise ConfigError(
            f"{place} points to tokens, not to documents; write it as tokens, not as corpus"
        )
    return found[0].documents


def publish(recipe: Recipe, version: CorpusVersion, read: str | None) -> str:
    """Make a version the current one; returns the version of the pointer's file. read: the version
    of that file on which it is based.

    Raises InfrastructureError if another run has published first."""
    document = version.encode()
    store.write_bytes(recipe.at("versions", version.version, "version.json"), document)
    return replace_pointer(recipe.at(CURRENT), document, read)


def mark_announced(recipe: Recipe, version: CorpusVersion, read: str) -> None:
    """Record in the pointer that the event was sent."""
    replace_pointer(recipe.at(CURRENT), replace(version, announced=True).encode(), read)


def replace_pointer(url: str, document: bytes, read: str | None) -> str:
    """Write a pointer that has not changed since `read`; returns the version of its file.

    Raises InfrastructureError if another run has written it."""
    if read is None:
        written = conditional.put_if_absent(url, document)
    else:
        written = conditional.replace_if_match(url, document, read)
    if written is None:
        raise InfrastructureError(f"{url}: another run published first; start this one again")
    return written


def find_sources(recipe: Recipe, options: str) -> tuple[CorpusObject, ...]:
    """Every source in the order of the patterns, with the digest of its contents. options: digest
    of those that affect a part."""
    found, manifests = [], Manifests()
    for url in expand(recipe.corpus):
        digest = resolve("source", [url], manifests).digest
        part = recipe.at("parts", options[:SHORT], digest[:LONG])
        found.append(CorpusObject(url, digest, part))
    return tuple(found)


def unique_sources(sources: Sequence[CorpusObject]) -> list[CorpusObject]:
    """One source per contents: copies of a file count once."""
    first: dict[str, CorpusObject] = {}
    for source in sources:
        first.setdefault(source.digest, source)
    return list(first.values())


def is_same(current: CorpusVersion, sources: Sequence[CorpusObject], options: str) -> bool:
    """Whether a version has these contents, made with these options."""
    return current.options_digest == options and _contents(current.sources) == _contents(sources)


def _contents(sources: Sequence[CorpusObject]) -> list[str]:
    return [source.digest for source in unique_sources(sources)]


def next_version(
    recipe: Recipe,
    current: CorpusVersion | None,
    sources: tuple[CorpusObject, ...],
    options: str,
    now: float | None,
) -> CorpusVersion:
    """The version after the current one; the caller fills in what it consists of."""
    number = 1 if current is None else current.number + 1
    name = f"{number:04d}-{digest_document([options, _contents(sources)])[:SHORT]}"
    before = () if current is None else current.sources
    had, have = {source.digest for source in before}, {source.url for source in sources}
    return CorpusVersion(
        version=name,
        number=number,
        options_digest=options,
        tokens={},
        sources=sources,
        added=tuple(source.url for source in sources if source.digest not in had),
        removed=tuple(source.url for source in before if source.url not in have),
        previous=None if current is None else current.version,
        published=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
    )


def describe(version: CorpusVersion, is_news: bool) -> str:
    """A version in one line, for a person."""
    if not is_news:
        return f"no new sources since version {version.version} ({len(version.sources)} sources)"
    changes = f"{len(version.added)} new or changed, {len(version.removed)} gone"
    return f"version {version.version}: {len(version.sources)} sources, {changes}"
