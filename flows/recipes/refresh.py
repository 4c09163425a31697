"""Versions of a growing corpus: finds new sources, plans their jobs, publishes the version.

Under the root of a recipe, `yard/NAME/`:

    parts/OPTIONS/DIGEST*        tokens of one source, named by the digest of its contents
    versions/VERSION/corpus*     the parts of a version in one pair
    versions/VERSION/version.json    its sources and options
    current.json                 the pointer: that document of the version to train on

All versions share the parts; a version never changes. No Prefect here."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flows.recipes.corpus import part_names, unique_names
from flows.recipes.recipe import Recipe
from flows.recipes.stage_job import StageJob, build_config
from trainyard import json_text
from trainyard.artifacts import conditional, store
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import Manifests, resolve
from trainyard.artifacts.manifest import read_manifest
from trainyard.config import digest_relevant, from_table
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
    """Prefix of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusVersion:
    """A complete, immutable version of the corpus."""

    version: str
    number: int
    """From 1."""
    options_digest: str
    """Digest of all options in [tokenize] and [merge] that affect tokens."""
    tokens: dict[str, str]
    """Prefix of each pair, by the JSON key of its text."""
    sources: tuple[CorpusObject, ...]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """The jobs for the current sources."""

    version: CorpusVersion
    is_news: bool
    tokenize: tuple[StageJob, ...] = ()
    merge: tuple[StageJob, ...] = ()
    read: str | None = None
    """Version of the pointer's file on which this is based."""

    def all(self) -> list[StageJob]:
        """Every job."""
        return [*self.tokenize, *self.merge]


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


def plan_refresh(recipe: Recipe, now: float | None = None) -> Refresh:
    """Compare the sources with the current version; writes nothing.

    Raises ConfigError for a recipe that cannot be refreshed, ArtifactError for a missing source."""
    template = check_refresh(recipe)
    options = _options_digest(recipe, template)
    sources = _find(recipe, options)
    found = read_pointer(recipe.at(CURRENT))
    current, read = found if found is not None else (None, None)
    if current is not None and _same(current, sources, options):
        return Refresh(version=current, is_news=False, read=read)
    version = _next(recipe, current, sources, options, template, now)
    missing = [
        source for source in unique_sources(sources) if read_manifest(_manifest(source)) is None
    ]
    return Refresh(
        version=version,
        is_news=True,
        tokenize=_tokenize_jobs(recipe, missing),
        merge=_merge_jobs(recipe, version, template),
        read=read,
    )


def publish(recipe: Recipe, refresh: Refresh) -> str:
    """Make the version the current one; returns the version of the pointer's file.

    Raises InfrastructureError if another run has published first."""
    document = refresh.version.encode()
    store.write_bytes(recipe.at("versions", refresh.version.version, "version.json"), document)
    return replace_pointer(recipe.at(CURRENT), document, refresh.read)


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


# --- sources --------------------------------------------------------------------------------------


def _options_digest(recipe: Recipe, template: Any) -> str:
    """Digest of all that affects tokens besides the sources: options, and the tokenizer's files."""
    files = [resolve("tokenizer", [url]).digest for url in template.inputs()["tokenizer"]]
    return digest_document([digest_relevant(template), files, recipe.table("merge")])


def check_refresh(recipe: Recipe) -> Any:
    """The options of the tokenization; ConfigError for a recipe that cannot be refreshed."""
    if not recipe.corpus:
        raise ConfigError(
            f"{recipe.where}: corpus-refresh needs sources; add "
            f'corpus = ["s3://bucket/folder/"] above the tables'
        )
    if "tokenizer_type" not in recipe.table("tokenize"):
        raise ConfigError(
            f"{recipe.where}: a growing corpus needs a fixed tokenizer; name one in [tokenize], "
            f"such as the folder that train_tokenizer made"
        )
    document = {"input": ["-"], "output_prefix": "-", **recipe.table("tokenize")}
    return build_config("tokenize", document, f"{recipe.where} [tokenize]")


def _find(recipe: Recipe, options: str) -> tuple[CorpusObject, ...]:
    """Every source in the order of the patterns, with the digest of its contents."""
    files = [file for pattern in recipe.corpus for file in store.expand(pattern)]
    found, manifests = [], Manifests()
    for url in dict.fromkeys(files):
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


def _same(current: CorpusVersion, sources: Sequence[CorpusObject], options: str) -> bool:
    return current.options_digest == options and _contents(current.sources) == _contents(sources)


def _contents(sources: Sequence[CorpusObject]) -> list[str]:
    return [source.digest for source in unique_sources(sources)]


def _manifest(source: CorpusObject) -> str:
    return f"{source.part}.manifest.json"


# --- jobs -----------------------------------------------------------------------------------------


def _next(
    recipe: Recipe,
    current: CorpusVersion | None,
    sources: tuple[CorpusObject, ...],
    options: str,
    template: Any,
    now: float | None,
) -> CorpusVersion:
    number = 1 if current is None else current.number + 1
    name = f"{number:04d}-{digest_document([options, _contents(sources)])[:SHORT]}"
    before = () if current is None else current.sources
    had, have = {source.digest for source in before}, {source.url for source in sources}
    return CorpusVersion(
        version=name,
        number=number,
        options_digest=options,
        tokens={
            key: recipe.at("versions", name, "corpus" + template.file_stem(key))
            for key in template.json_keys
        },
        sources=sources,
        added=tuple(source.url for source in sources if source.digest not in had),
        removed=tuple(source.url for source in before if source.url not in have),
        previous=None if current is None else current.version,
        published=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
    )


def _tokenize_jobs(recipe: Recipe, sources: Sequence[CorpusObject]) -> tuple[StageJob, ...]:
    names = part_names([source.url for source in sources])
    return tuple(
        recipe.job(
            "tokenize",
            {"input": [source.url], "output_prefix": source.part},
            f"tokenize-{name.lower()}",
        )
        for source, name in zip(sources, names, strict=True)
    )


def _merge_jobs(recipe: Recipe, version: CorpusVersion, template: Any) -> tuple[StageJob, ...]:
    parts = [source.part for source in unique_sources(version.sources)]
    names = unique_names(list(version.tokens), list(version.tokens))
    return tuple(
        recipe.job(
            "merge",
            {"input": [part + template.file_stem(key) for part in parts], "output_prefix": prefix},
            "merge" if len(names) == 1 else f"merge-{name.lower()}",
        )
        for name, (key, prefix) in zip(names, version.tokens.items(), strict=True)
    )
