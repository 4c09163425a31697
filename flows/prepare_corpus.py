"""Turns raw text into one pair of token files, by a recipe: the first half of flow pretrain_gpt.

    python -m flows.prepare_corpus recipes/quickstart.toml [--root DIR] [--profile NAME]

A later pretrain_gpt of the same recipe in the same yard reuses all of it."""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported, which reads its environment
    from flows.cli.flow_commands import flow_main

    raise SystemExit(flow_main("prepare_corpus"))

import asyncio
from typing import Any

from prefect import flow

from flows.recipes.corpus import CorpusJobs, corpus_jobs
from flows.recipes.form_schema import EMPTY, Collect, Merge, Tokenize, TrainTokenizer, non_empty
from flows.recipes.recipe import read_recipe
from flows.runner.flow_errors import report_errors
from flows.runner.stage_runner import StageRunner
from flows.yard.read_profile import DEFAULT
from flows.yard.registered_profile import yard_profile
from trainyard.version import VERSION


@flow(name="prepare-corpus", flow_run_name="{recipe}", persist_result=False, version=VERSION)
@report_errors
async def prepare_corpus(
    recipe: str = "recipes/quickstart.toml",
    yard: str | None = None,
    profile: str = DEFAULT,
    collect: Collect = EMPTY,
    train_tokenizer: TrainTokenizer = EMPTY,
    tokenize: Tokenize = EMPTY,
    merge: Merge = EMPTY,
) -> dict[str, Any]:
    """Collect, train a tokenizer, tokenize and merge, as far as the recipe has these tables.

    Args:
        recipe: TOML file or URL with a table of options for each stage.
        yard: Folder or URL of all artifacts; unset: variable YARD, else that of the profile, else
            `yard`.
        profile: Where stages run: the name of a profile; at a shell also a path.
        collect: Options that override the recipe's [collect].
        train_tokenizer: Options that override the recipe's [train_tokenizer].
        tokenize: Options that override the recipe's [tokenize].
        merge: Options that override the recipe's [merge]."""
    site = await yard_profile(profile)
    tables = {
        "collect": collect,
        "train_tokenizer": train_tokenizer,
        "tokenize": tokenize,
        "merge": merge,
    }
    written = read_recipe(recipe, site.yard_root(yard)).with_options(non_empty(tables))
    await asyncio.to_thread(corpus_jobs, written)  # a wrong recipe fails before any waiting
    async with StageRunner("prepare-corpus", written.root, profile=site) as runner:
        # Derive the jobs again: another run that had the lock may have added files.
        jobs = await asyncio.to_thread(corpus_jobs, written)
        await runner.expect(jobs.all())
        await make_tokens(runner, jobs)
    return {"tokens": jobs.tokens, "stages": runner.documents()}


async def make_tokens(runner: StageRunner, jobs: CorpusJobs) -> None:
    """Run all stages from documents to one pair of token files."""
    await runner.run(jobs.collect)
    await runner.run(jobs.train_tokenizer)
    await runner.run(*jobs.tokenize)
    await runner.drop_all_but(jobs.tokenize)
    await runner.run(jobs.merge)
