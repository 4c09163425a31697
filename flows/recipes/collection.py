"""A corpus of documents that grows: from dumps, crawls or lists to clean text, version by version.

Under the root of a recipe, `yard/NAME/`:

    parts/OPTIONS/DIGEST/STAGE   what was made of one source alone, named by its contents' digest
    versions/VERSION/STAGE       what was made of all sources together
    versions/VERSION/datasheet*  the page about it
    versions/VERSION/version.json    its sources and options
    current.json                 the pointer: that document of the newest version

Which stages there are follows from the tables of the recipe. All versions share the parts. No
Prefect here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flows.recipes.corpus import part_names
from flows.recipes.corpus_versions import (
    CURRENT,
    CorpusObject,
    CorpusVersion,
    documents_of,
    find_sources,
    is_same,
    next_version,
    read_pointer,
    unique_sources,
)
from flows.recipes.recipe import FETCH, Recipe, stage_of
from flows.recipes.stage_job import StageJob, build_config
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import resolve
from trainyard.artifacts.manifest import read_manifest
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import join
from trainyard.config import digest_relevant
from trainyard.errors import ConfigError

EACH = (FETCH, "collect", "clean")
"""Tables of the stages that each source goes through alone, in order."""
TOGETHER = ("dedup", "decontaminate", "mix")
"""Stages that all sources go through together, in order."""
DATASHEET = "datasheet"
DOCUMENTS, PAGES = "documents-*.jsonl", "pages-*.warc.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """The jobs for the current sources."""

    version: CorpusVersion
    is_news: bool
    steps: tuple[tuple[StageJob, ...], ...]
    """Jobs that may run side by side, step by step; without news the page alone, whose options may
    have changed."""
    read: str | None = None
    """Version of the pointer's file on which this is based."""

    @property
    def jobs(self) -> list[StageJob]:
        """Every job."""
        return [job for step in self.steps for job in step]


def plan_collection(recipe: Recipe, now: float | None = None) -> Collection:
    """Compare the sources with the current version; writes nothing.

    Raises ConfigError for a wrong recipe, ArtifactError for a missing source."""
    check_collection(recipe)
    each, together = _present(recipe, EACH), _present(recipe, TOGETHER)
    options = digest_document([_options(recipe, stage) for stage in (*each, *together)])
    of_part = digest_document([_options(recipe, stage) for stage in each])
    sources = _sources(recipe, of_part, each)
    found = read_pointer(recipe.at(CURRENT))
    current, read = found if found is not None else (None, None)
    if current is not None and is_same(current, sources, options):
        steps, _ = _of_all(recipe, current, each, together)
        return Collection(version=current, is_news=False, steps=tuple(steps[-1:]), read=read)
    version = next_version(recipe, current, sources, options, now)
    steps, documents = _of_all(recipe, version, each, together)
    return Collection(
        version=replace(version, documents=documents, datasheet=_datasheet(recipe, version)),
        is_news=True,
        steps=(*_of_each(recipe, sources, each), *steps),
        read=read,
    )


def check_collection(recipe: Recipe) -> None:
    """Raise ConfigError for a recipe that collects nothing."""
    if not _present(recipe, (*EACH, *TOGETHER)):
        raise ConfigError(
            f"{recipe.where}: collect-corpus runs the stages that the recipe has tables of, and it "
            f"has none of [{'], ['.join((*EACH, *TOGETHER))}]; add one, if empty"
        )
    if not recipe.corpus and not _mixes_others(recipe):
        raise ConfigError(
            f'{recipe.where}: collect-corpus needs sources; add corpus = ["dumps/*.xml.bz2"] above '
            "the tables, or [mix] with sources and input"
        )
    if recipe.corpus and _mixes_others(recipe):
        raise ConfigError(
            f"{recipe.where}: [mix] with an input mixes finished corpora, and corpus names others "
            "to collect; keep these in a recipe of their own"
        )
    if _mixes_others(recipe) and len(_present(recipe, (*EACH, *TOGETHER))) > 1:
        raise ConfigError(
            f"{recipe.where}: [mix] with an input mixes finished corpora, so other tables than "
            f"[mix] and [{DATASHEET}] have nothing to read; leave them out"
        )
    if FETCH in recipe.tables and recipe.table("collect").get("source") != "warc":
        raise ConfigError(
            f"{recipe.where}: [{FETCH}] writes pages as WARC files, which only [collect] with "
            'source = "warc" reads; add it'
        )


def _mixes_others(recipe: Recipe) -> bool:
    return bool(recipe.table("mix").get("input"))


def _present(recipe: Recipe, stages: Sequence[str]) -> list[str]:
    return [stage for stage in stages if stage in recipe.tables]


def _sources(recipe: Recipe, options: str, each: Sequence[str]) -> tuple[CorpusObject, ...]:
    """The sources; the part of one is the folder of its last stage, or itself."""
    if _mixes_others(recipe):
        recipe = replace(recipe, corpus=tuple(recipe.table("mix")["input"]))
    found = find_sources(recipe, options)
    if not each:
        return tuple(replace(source, part=source.url) for source in found)
    return tuple(replace(source, part=join(source.part, each[-1])) for source in found)


def _options(recipe: Recipe, table: str) -> Any:
    """All that affects what a stage makes besides its documents: its options and other inputs."""
    if table == "mix" and _mixes_others(recipe):
        return recipe.table(table)
    decided: dict[str, Any] = {"input": ["-"], "output_dir": "-"}
    if table == "mix":
        decided["sources"] = [recipe.name]
    if table == FETCH:
        decided["source"] = FETCH
    document = {**recipe.table(table), **decided}
    config = build_config(stage_of(table), document, f"{recipe.where} [{table}]")
    others = {
        name: resolve(name, urls).digest
        for name, urls in config.inputs().items()
        if urls and "-" not in urls
    }
    return [digest_relevant(config), others]


# --- jobs -----------------------------------------------------------------------------------------


def _of_each(
    recipe: Recipe, sources: Sequence[CorpusObject], each: Sequence[str]
) -> list[tuple[StageJob, ...]]:
    """A step for each stage, with a job for each source that is not done."""
    todo = [
        source
        for source in unique_sources(sources)
        if each and read_manifest(Output.directory(source.part).manifest_url) is None
    ]
    names = part_names([source.url for source in todo])
    steps: list[tuple[StageJob, ...]] = []
    for number, table in enumerate(each):
        jobs = []
        for source, name in zip(todo, names, strict=True):
            folder = source.part.removesuffix(f"/{each[-1]}")
            before = source.url
            if number:
                made = PAGES if each[number - 1] == FETCH else DOCUMENTS
                before = join(folder, each[number - 1], made)
            decided = {"input": [before], "output_dir": join(folder, table)}
            if table == FETCH:
                decided["source"] = FETCH
            jobs.append(
                recipe.job(stage_of(table), decided, f"{table}-{name.lower()}", table=table)
            )
        # Lists name the same hosts, which are asked for one page at a time.
        steps += [(job,) for job in jobs] if table == FETCH else [tuple(jobs)]
    return [step for step in steps if step]


def _of_all(
    recipe: Recipe, version: CorpusVersion, each: Sequence[str], together: Sequence[str]
) -> tuple[list[tuple[StageJob, ...]], tuple[str, ...]]:
    """The steps of all sources together, and the patterns of the documents that they end with."""
    parts = [source.part for source in unique_sources(version.sources)]
    documents = [join(part, DOCUMENTS) for part in parts] if each else parts
    folders = [part.removesuffix(each[-1]) + stage for stage in each for part in parts]
    steps = []
    for stage in together:
        folder = recipe.at("versions", version.version, stage)
        decided: dict[str, Any] = {"input": documents, "output_dir": folder}
        if stage == "mix" and _mixes_others(recipe):
            decided |= _places(recipe)
        elif stage == "mix":
            decided["sources"] = [recipe.name] * len(documents)
        steps.append((_job(recipe, stage, decided),))
        documents = [join(folder, DOCUMENTS)]
        folders.append(folder)
    sheet = _datasheet(recipe, version)
    decided = {"folders": folders, "documents": documents, "output_prefix": sheet}
    if not recipe.table(DATASHEET).get("title"):
        decided["title"] = recipe.name
    return [*steps, (recipe.job(DATASHEET, decided),)], tuple(documents)


def _datasheet(recipe: Recipe, version: CorpusVersion) -> str:
    return recipe.at("versions", version.version, DATASHEET)


def _job(recipe: Recipe, stage: str, decided: dict[str, Any]) -> StageJob:
    """A job; the flow replaces the pointers that [mix] may name by what they point to now."""
    if stage == "mix" and _mixes_others(recipe):
        written = {k: v for k, v in recipe.table(stage).items() if k not in decided}
        recipe = replace(recipe, tables={**recipe.tables, stage: written})
    return recipe.job(stage, decided)


def _places(recipe: Recipe) -> dict[str, list[str]]:
    """The places of the sources of [mix], with the name of each: a pointer stands for all that its
    newest version consists of."""
    written = build_config(
        "mix", {**recipe.table("mix"), "output_dir": "-"}, f"{recipe.where} [mix]"
    )
    found = [
        (name, one)
        for name, place in zip(written.sources, written.input, strict=True)
        for one in documents_of(place)
    ]
    return {"sources": [name for name, _ in found], "input": [one for _, one in found]}
