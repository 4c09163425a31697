"""Versions of a growing corpus: finds new sources, plans their jobs, publishes the version.

Under the root of a recipe, `yard/NAME/`:

    parts/OPTIONS/DIGEST*        tokens of one source, named by the digest of its contents
    versions/VERSION/corpus*     a virtual dataset of the parts of a version, or, with virtual =
                                 false in [merge], one pair with a copy of them
    versions/VERSION/version.json    its sources and options
    current.json                 the pointer: that document of the version to train on

All versions share the parts; a version never changes. No Prefect here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flows.recipes.corpus import part_names, unique_names
from flows.recipes.corpus_versions import (
    CURRENT,
    CorpusObject,
    CorpusVersion,
    find_sources,
    is_same,
    next_version,
    read_pointer,
    unique_sources,
)
from flows.recipes.recipe import Recipe
from flows.recipes.stage_job import StageJob, build_config
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import resolve
from trainyard.artifacts.manifest import read_manifest
from trainyard.config import digest_relevant
from trainyard.errors import ConfigError


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


def plan_refresh(recipe: Recipe, now: float | None = None) -> Refresh:
    """Compare the sources with the current version; writes nothing.

    Raises ConfigError for a recipe that cannot be refreshed, ArtifactError for a missing source."""
    template = check_refresh(recipe)
    options = _options_digest(recipe, template)
    sources = find_sources(recipe, options)
    found = read_pointer(recipe.at(CURRENT))
    current, read = found if found is not None else (None, None)
    if current is not None and is_same(current, sources, options):
        return Refresh(version=current, is_news=False, read=read)
    version = next_version(recipe, current, sources, options, now)
    stems = {key: "corpus" + template.file_stem(key) for key in template.json_keys}
    tokens = {key: recipe.at("versions", version.version, stem) for key, stem in stems.items()}
    version = replace(version, tokens=tokens)
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


# --- sources --------------------------------------------------------------------------------------


def _options_digest(recipe: Recipe, template: Any) -> str:
    """Digest of all that affects tokens besides the sources: options, and the tokenizer's files."""
    files = [resolve("tokenizer", [url]).digest for url in template.inputs()["tokenizer"]]
    merge = {key: value for key, value in recipe.table("merge").items() if key != "virtual"}
    return digest_document([digest_relevant(template), files, merge])


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


def _manifest(source: CorpusObject) -> str:
    return f"{source.part}.manifest.json"


# --- jobs -----------------------------------------------------------------------------------------


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
    # A version copies nothing: the tokens of a source are written once, however many versions come.
    default = {"virtual": True} if "virtual" not in recipe.table("merge") else {}
    inputs = {key: [part + template.file_stem(key) for part in parts] for key in version.tokens}
    return tuple(
        recipe.job(
            "merge",
            {"input": inputs[key], "output_prefix": prefix, **default},
            "merge" if len(names) == 1 else f"merge-{name.lower()}",
        )
        for name, (key, prefix) in zip(names, version.tokens.items(), strict=True)
    )
