"""Refresh a growing corpus: find new or changed sources, tokenize them, publish a new version.

    python -m flows.corpus_refresh recipes/web.toml [--root DIR] [--profile NAME]

Run it on a schedule: without new sources it does nothing. A new version goes beside the old ones,
and the pointer current.json names it. Recipes with tokens = "YARD/web/current.json" train on it."""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported, which reads its environment
    from flows.cli.flow_commands import flow_main

    raise SystemExit(flow_main("corpus_refresh"))

import asyncio
from datetime import UTC, datetime
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.events import Event
from prefect.events.related import related_resources_from_run_context
from prefect.settings import PREFECT_API_URL

from flows.logs.console import headline
from flows.recipes.corpus_versions import CURRENT, CorpusVersion, describe, mark_announced, publish
from flows.recipes.overrides import read_overrides
from flows.recipes.recipe import Recipe, read_recipe
from flows.recipes.refresh import plan_refresh
from flows.recipes.refresh_retro import (
    RetroVersion,
    check_retro,
    plan_retro,
    publish_retro,
    wants_retro,
)
from flows.runner.flow_errors import report_errors
from flows.runner.run_name import of_recipe
from flows.runner.stage_runner import StageRunner
from flows.server.ephemeral import is_alone
from flows.yard.read_profile import DEFAULT
from flows.yard.registered_profile import yard_profile
from trainyard.version import VERSION

PUBLISHED = "trainyard.corpus.published"
"""The event of a new version; its resource is trainyard.corpus.RECIPE."""

YARD = "trainyard.yard"
"""Label of that resource: the profile of the refresh."""


@flow(name="corpus-refresh", flow_run_name=of_recipe, persist_result=False, version=VERSION)
@report_errors
async def corpus_refresh(
    recipe: str,
    workers: int | None = None,
    overrides: str | None = None,
    yard: str | None = None,
    profile: str = DEFAULT,
) -> dict[str, Any]:
    """Tokenize the new sources of a corpus, and publish a new version beside the old ones. With
    [retro_db], add their chunks to an index as well.

    Args:
        recipe: TOML file with `corpus` and a tokenizer in [tokenize], of the sources or by path or
            URL.
        workers: Processes of a tokenization. Empty: as the recipe says.
        overrides: More options, as lines of STAGE.KEY = VALUE or as in a recipe, such as
            `tokenize.on_bad_line = skip`.
        yard: Folder or URL of all artifacts. Empty: variable YARD, else `store` of the profile,
            else `yard`.
        profile: Where stages run: the name of a profile; at a shell also a path."""
    site = await yard_profile(profile)
    given = read_overrides("corpus-refresh", overrides, tokenize={"workers": workers})
    written = read_recipe(recipe, site.yard_root(yard)).with_options(given)
    async with StageRunner("corpus-refresh", written.root, profile=site) as runner:
        if wants_retro(written):
            await asyncio.to_thread(check_retro, written)
        work = await asyncio.to_thread(plan_refresh, written)
        await runner.expect(work.all())
        version, read = work.version, work.read
        if work.is_news:
            await runner.run_for_files(work.tokenize)
            await runner.run(*work.merge)
            read = await asyncio.to_thread(publish, written, version, work.read)
        note, is_new = describe(version, work.is_news), not version.announced
        if is_new and not _has_server():
            note += "; not announced, because PREFECT_API_URL names no server"
        headline(get_run_logger(), "corpus", "done", note=note)
        retro = await _grow_index(runner, written, version) if wants_retro(written) else None
        if is_new and _has_server() and read is not None:
            await _announce(written, version, site.name)
            await asyncio.to_thread(mark_announced, written, version, read)
    return {
        "news": work.is_news,
        "version": version.version,
        "tokens": version.tokens,
        "pointer": written.at(CURRENT),
        "retro": None if retro is None else retro.index,
        "stages": runner.documents(),
    }


async def _grow_index(runner: StageRunner, written: Recipe, version: CorpusVersion) -> RetroVersion:
    """Add the new documents of a version to the index of the recipe, in a version of its own."""
    work = await asyncio.to_thread(plan_retro, written, version)
    if work.jobs:
        await runner.expect(list(work.jobs))
        for job in work.jobs:
            await runner.run(job)
        await asyncio.to_thread(publish_retro, written, work)
    return work.version


def _has_server() -> bool:
    """Whether there is a server that outlives this flow and may react to the event."""
    return PREFECT_API_URL.value() is not None and not is_alone()


async def _announce(recipe: Recipe, version: CorpusVersion, yard: str) -> None:
    """Send the event, and wait until the server has it. Prefect's emit_event only queues it."""
    event = Event.model_validate(
        {
            "occurred": datetime.now(UTC),
            "event": PUBLISHED,
            "resource": {
                "prefect.resource.id": f"trainyard.corpus.{recipe.name}",
                "prefect.resource.name": recipe.name,
                "trainyard.version": version.version,
                YARD: yard,
            },
            "payload": {
                "version": version.version,
                "pointer": recipe.at(CURRENT),
                "tokens": version.tokens,
                "added": len(version.added),
                "removed": len(version.removed),
                "sources": len(version.sources),
            },
        }
    )
    async with get_client() as client:
        event.related += await related_resources_from_run_context(client)
        await client.request("POST", "/events", json=[event.model_dump(mode="json")])
