"""Collects a corpus: dumps, crawls or lists to clean, deduplicated documents with a datasheet.

    python -m flows.collect_corpus recipes/corpora/wikipedia.toml [--root DIR] [--profile NAME]

Run it on a schedule: without new sources it does nothing. Only a new source is collected and
cleaned; a new version of the corpus goes beside the old ones, and the pointer current.json names
it. Recipes with corpus = ["YARD/wikipedia/current.json"] tokenize or mix its documents."""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported, which reads its environment
    from flows.cli.flow_commands import flow_main

    raise SystemExit(flow_main("collect_corpus"))

import asyncio
from typing import Any

from prefect import flow, get_run_logger

from flows.logs.console import headline
from flows.recipes.collection import plan_collection
from flows.recipes.corpus_versions import CURRENT, describe, publish
from flows.recipes.force import forced_names
from flows.recipes.overrides import read_overrides
from flows.recipes.recipe import read_recipe
from flows.runner.flow_errors import report_errors
from flows.runner.run_name import of_recipe
from flows.runner.stage_runner import StageRunner
from flows.yard.read_profile import DEFAULT
from flows.yard.registered_profile import yard_profile
from trainyard.version import VERSION


@flow(name="collect-corpus", flow_run_name=of_recipe, persist_result=False, version=VERSION)
@report_errors
async def collect_corpus(
    recipe: str = "recipes/corpora/wikipedia.toml",
    force: str | None = None,
    overrides: str | None = None,
    yard: str | None = None,
    profile: str = DEFAULT,
) -> dict[str, Any]:
    """Fetch, collect, clean, deduplicate, decontaminate and mix, as far as the recipe has these
    tables; publish a new version of the documents with its datasheet.

    Args:
        recipe: TOML file with `corpus` and a table of options for each stage, of the sources or by
            path or URL.
        force: Stages that run even if nothing changed, such as `dedup mix`; `all`: every one.
            Empty: none.
        overrides: More options, as lines of STAGE.KEY = VALUE or as in a recipe, such as
            `dedup.jaccard_threshold = 0.7`.
        yard: Folder or URL of all artifacts. Empty: variable YARD, else `store` of the profile,
            else `yard`.
        profile: Where stages run: the name of a profile; at a shell also a path."""
    site = await yard_profile(profile)
    given = read_overrides("collect-corpus", overrides)
    written = read_recipe(recipe, site.yard_root(yard)).with_options(given)
    checked = await asyncio.to_thread(plan_collection, written)  # before any waiting
    forced = forced_names(force, checked.jobs)
    async with StageRunner("collect-corpus", written.root, profile=site, force=forced) as runner:
        work = await asyncio.to_thread(plan_collection, written)
        await runner.expect(work.jobs)
        for step in work.steps:
            await runner.run(*step)
        if work.is_news:
            await asyncio.to_thread(publish, written, work.version, work.read)
        headline(get_run_logger(), "corpus", "done", note=describe(work.version, work.is_news))
    return {
        "news": work.is_news,
        "version": work.version.version,
        "documents": list(work.version.documents),
        "pointer": written.at(CURRENT),
        "card": f"{work.version.datasheet}.html",
        "stages": runner.documents(),
    }
