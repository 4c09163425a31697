"""Raw text to one pair of token files, from a recipe: the first half of flow pretrain_gpt.

    python -m flows.prepare_corpus recipes/quickstart.toml [--root DIR] [--profile NAME]

A later pretrain_gpt of the same recipe in the same yard reuses all of it."""

from __future__ import annotations

if __name__ == "__main__":  # before prefect is imported: it reads its environment when it is
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
    """Collect, train a tokenizer, tokenize, merge; as far as the recipe has them.

    Args:
        recipe: TOML file or URL with a table of options for each stage.
        yard: Folder or URL under which all artifacts lie; unset: variable YARD, else that of the
            profile, else `yard`.
        profile: Where stages run: a file of deploy/yards, by its name or path.
        collect: Options that go over the recipe's [collect].
        train_tokenizer: Options that go over the recipe's [train_tokenizer].
        tokenize: Options that go over the recipe's [tokenize].
        merge: Options that go over the recipe's [merge]."""
    place = await yard_profile(profile)
    tables = {
        "collect": collect,
        "train_tokenizer": train_tokenizer,
        "tokenize": tokenize,
        "merge": merge,
    }
    written = read_recipe(recipe, place.yard_root(yard)).with_options(non_empty(tables))
    await asyncio.to_thread(corpus_jobs, written)  # what is wrong is said before any waiting
    async with StageRunner("prepare-corpus", written.root, profile=place) as line:
        # Anew: files may have come while another run had the turn.
        jobs = await asyncio.to_thread(corpus_jobs, written)
        await line.expect(jobs.all())
        await make_tokens(line, jobs)
    return {"tokens": jobs.tokens, "stages": line.documents()}


async def make_tokens(line: StageRunner, jobs: CorpusJobs) -> None:
    """Everything from documents to one pair of token files."""
    await line.run(jobs.collect)
    await line.run(jobs.train_tokenizer)
    await line.run(*jobs.tokenize)
    await line.drop_all_but(jobs.tokenize)
    await line.run(jobs.merge)
