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
from flows.recipes.force import forced_names
from flows.recipes.inputs import check_inputs
from flows.recipes.overrides import AS_RECIPE, Choice, read_overrides
from flows.recipes.recipe import read_recipe
from flows.runner.flow_errors import report_errors
from flows.runner.run_name import of_recipe
from flows.runner.stage_runner import StageRunner
from flows.yard.read_profile import DEFAULT
from flows.yard.registered_profile import yard_profile
from trainyard.version import VERSION


@flow(name="prepare-corpus", flow_run_name=of_recipe, persist_result=False, version=VERSION)
@report_errors
async def prepare_corpus(
    recipe: str = "recipes/quickstart.toml",
    max_size_mb: float | None = None,
    vocab_size: int | None = None,
    tokenizer_type: str | None = None,
    tokenizer_model: str | None = None,
    append_eod: Choice = AS_RECIPE,
    workers: int | None = None,
    force: str | None = None,
    overrides: str | None = None,
    yard: str | None = None,
    profile: str = DEFAULT,
) -> dict[str, Any]:
    """Collect, train a tokenizer, tokenize and merge, as far as the recipe has these tables.

    Args:
        recipe: TOML file with a table of options for each stage, of the sources or by path or URL.
        max_size_mb: Text to collect. Empty: as the recipe says.
        vocab_size: Tokens of the tokenizer to train. Empty: as the recipe says.
        tokenizer_type: Of an existing tokenizer. Empty: as the recipe says.
        tokenizer_model: Its file or folder. Empty: as the recipe says.
        append_eod: Mark the end of each document.
        workers: Processes of a tokenization. Empty: as the recipe says.
        force: Stages that run even if nothing changed, such as `tokenize merge`; `all`: every one.
            Empty: none.
        overrides: More options, as lines of STAGE.KEY = VALUE or as in a recipe, such as
            `corpus = ["books/*.jsonl"]`.
        yard: Folder or URL of all artifacts. Empty: variable YARD, else `store` of the profile,
            else `yard`.
        profile: Where stages run: the name of a profile; at a shell also a path."""
    site = await yard_profile(profile)
    given = read_overrides(
        "prepare-corpus",
        overrides,
        collect={"max_size_mb": max_size_mb},
        train_tokenizer={"vocab_size": vocab_size},
        tokenize={
            "tokenizer_type": tokenizer_type,
            "tokenizer_model": tokenizer_model,
            "append_eod": append_eod,
            "workers": workers,
        },
    )
    written = read_recipe(recipe, site.yard_root(yard)).with_options(given)
    checked = await asyncio.to_thread(corpus_jobs, written)  # before any waiting
    await asyncio.to_thread(check_inputs, written, checked.all(), site.backend)
    forced = forced_names(force, checked.all())
    async with StageRunner("prepare-corpus", written.root, profile=site, force=forced) as runner:
        # Derive the jobs again: another run that had the lock may have added files.
        jobs = await asyncio.to_thread(corpus_jobs, written)
        await runner.expect(jobs.all())
        await make_tokens(runner, jobs)
    return {"tokens": jobs.tokens, "stages": runner.documents()}


async def make_tokens(runner: StageRunner, jobs: CorpusJobs) -> None:
    """Run all stages from documents to one pair of token files."""
    await runner.run(jobs.collect)
    await runner.run(jobs.train_tokenizer)
    await runner.run_for_files(jobs.tokenize)
    await runner.drop_all_but(jobs.tokenize)
    await runner.run(jobs.merge)
