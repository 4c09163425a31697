"""Turns raw text into Retro's chunk database, index and tables of neighbours, by one recipe.

    python -m flows.build_retro recipes/retro_quickstart.toml [--root DIR] [--verbose]

Needs no running server. A stage whose inputs, options and code did not change is reused."""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported, which reads its environment
    from flows.cli.flow_commands import flow_main

    raise SystemExit(flow_main("build_retro"))

import asyncio
from typing import Any

from prefect import flow

from flows.prepare_corpus import make_tokens
from flows.recipes.force import forced_names
from flows.recipes.inputs import check_inputs
from flows.recipes.overrides import read_overrides
from flows.recipes.recipe import read_recipe
from flows.recipes.retro import RetroJobs, retro_jobs
from flows.runner.flow_errors import report_errors
from flows.runner.run_name import of_recipe
from flows.runner.stage_runner import StageRunner
from flows.yard.read_profile import DEFAULT
from flows.yard.registered_profile import yard_profile
from trainyard.version import VERSION


@flow(name="build-retro", flow_run_name=of_recipe, persist_result=False, version=VERSION)
@report_errors
async def build_retro(
    recipe: str = "recipes/retro_quickstart.toml",
    encoder: str | None = None,
    tokens: str | None = None,
    retro_index_ntrain: int | None = None,
    retro_index_str: str | None = None,
    retro_min_recall: float | None = None,
    force: str | None = None,
    overrides: str | None = None,
    yard: str | None = None,
    profile: str = DEFAULT,
) -> dict[str, Any]:
    """Tokens, an encoder, chunks, their embeddings, an index, and the neighbours of all samples.

    Args:
        recipe: TOML file with a table of options for each stage, of the sources or by path or URL.
        encoder: Checkpoint of a BERT that embeds chunks, instead of training one. Empty: as the
            recipe says.
        tokens: Prefix of token files, or pointer of corpus-refresh. Empty: as the recipe says.
        retro_index_ntrain: Chunks that train the index. Empty: as the recipe says.
        retro_index_str: Index, for faiss's index_factory. Empty: as the recipe says.
        retro_min_recall: Recall below which no index is published. Empty: as the recipe says.
        force: Stages that run even if nothing changed, such as `faiss_train faiss_add`; `all`:
            every one. Empty: none.
        overrides: More options, as lines of STAGE.KEY = VALUE or as in a recipe, such as
            `retro_embed.bf16 = true`.
        yard: Folder or URL of all artifacts. Empty: variable YARD, else `store` of the profile,
            else `yard`.
        profile: Where stages run: the name of a profile; at a shell also a path."""
    site = await yard_profile(profile)
    given = read_overrides(
        "build-retro",
        overrides,
        encoder=encoder,
        tokens=tokens,
        retro_db={"retro_index_ntrain": retro_index_ntrain},
        faiss_train={"retro_index_str": retro_index_str},
        faiss_add={"retro_min_recall": retro_min_recall},
    )
    written = read_recipe(recipe, site.yard_root(yard)).with_options(given)
    checked = await asyncio.to_thread(retro_jobs, written)  # before any waiting
    await asyncio.to_thread(check_inputs, written, checked.all(), site.backend)
    forced = forced_names(force, checked.all())
    async with StageRunner("build-retro", written.root, profile=site, force=forced) as runner:
        # Derive the jobs again: another run that had the lock may have added files.
        jobs = await asyncio.to_thread(retro_jobs, written)
        await runner.expect(jobs.all())
        await find_neighbors(runner, jobs)
    return {"retro": written.at("retro"), "stages": runner.documents()}


async def find_neighbors(runner: StageRunner, jobs: RetroJobs) -> None:
    """Run all stages from documents to the tables of neighbours."""
    await make_tokens(runner, jobs.corpus)
    if jobs.bert_corpus is not None:
        await make_tokens(runner, jobs.bert_corpus)
        await runner.run(jobs.bert)
    await runner.run(jobs.database)
    await runner.run(jobs.embed_sampled)
    await runner.run(jobs.train_index)
    await runner.run(jobs.embed_train)
    await runner.run(jobs.add)
    for split in jobs.splits:
        await runner.run(split.embed)
        await runner.run(split.query)
