"""Turns raw text into a trained, resharded, evaluated and benchmarked GPT, by one recipe.

    python -m flows.pretrain_gpt recipes/quickstart.toml [--root DIR] [--verbose]

Needs no running server. A stage whose inputs, options and code did not change is reused."""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported, which reads its environment
    from flows.cli.flow_commands import flow_main

    raise SystemExit(flow_main("pretrain_gpt"))

import asyncio
from typing import Any

from prefect import flow, get_run_logger

from flows.recipes.form_schema import (
    EMPTY,
    Benchmark,
    Collect,
    Evaluate,
    Merge,
    Plan,
    Pretrain,
    Reshard,
    Tokenize,
    TrainTokenizer,
    non_empty,
)
from flows.recipes.pretrain import pretrain_jobs
from flows.recipes.recipe import read_recipe
from flows.runner.flow_errors import report_errors
from flows.runner.memory_check import unknown_gpu_memory
from flows.runner.stage_runner import StageRunner
from flows.yard.read_profile import DEFAULT
from flows.yard.registered_profile import yard_profile
from trainyard.version import VERSION


@flow(name="pretrain-gpt", flow_run_name="{recipe}", persist_result=False, version=VERSION)
@report_errors
async def pretrain_gpt(
    recipe: str = "recipes/quickstart.toml",
    yard: str | None = None,
    profile: str = DEFAULT,
    collect: Collect = EMPTY,
    train_tokenizer: TrainTokenizer = EMPTY,
    tokenize: Tokenize = EMPTY,
    merge: Merge = EMPTY,
    plan: Plan = EMPTY,
    pretrain: Pretrain = EMPTY,
    reshard: Reshard = EMPTY,
    evaluate: Evaluate = EMPTY,
    benchmark: Benchmark = EMPTY,
) -> dict[str, Any]:
    """Collect, tokenize, pretrain, reshard, evaluate, benchmark, report.

    Args:
        recipe: TOML file or URL with a table of options for each stage.
        yard: Folder or URL of all artifacts; unset: variable YARD, else that of the profile, else
            `yard`.
        profile: Where stages run: the name of a profile; at a shell also a path.
        collect: Options that override the recipe's [collect].
        train_tokenizer: Options that override the recipe's [train_tokenizer].
        tokenize: Options that override the recipe's [tokenize].
        merge: Options that override the recipe's [merge].
        plan: Options that override the recipe's [plan].
        pretrain: Options that override the recipe's [pretrain].
        reshard: Options that override the recipe's [reshard].
        evaluate: Options that override the recipe's [evaluate].
        benchmark: Options that override the recipe's [benchmark]."""
    site = await yard_profile(profile)
    tables = {
        "collect": collect,
        "train_tokenizer": train_tokenizer,
        "tokenize": tokenize,
        "merge": merge,
        "plan": plan,
        "pretrain": pretrain,
        "reshard": reshard,
        "evaluate": evaluate,
        "benchmark": benchmark,
    }
    written = read_recipe(recipe, site.yard_root(yard)).with_options(non_empty(tables))
    # A wrong recipe fails before any waiting.
    checked = await asyncio.to_thread(pretrain_jobs, written, site.training_resources())
    if remark := unknown_gpu_memory(site, checked.plan):
        get_run_logger().warning("%s", remark)
    card = written.at("card.html")
    async with StageRunner("pretrain-gpt", written.root, card, profile=site) as runner:
        # Derive the jobs again: another run that had the lock may have added files or a version.
        jobs = await asyncio.to_thread(pretrain_jobs, written, site.training_resources())
        await runner.expect(jobs.all())
        await runner.run(jobs.plan, jobs.collect)  # a layout that does not fit fails here
        await runner.run(jobs.train_tokenizer)
        await runner.run(*jobs.tokenize)
        await runner.drop_all_but(jobs.tokenize)
        await runner.run(jobs.merge)
        await runner.run(jobs.pretrain)
        await runner.run(jobs.export, jobs.reshard)
        await runner.run(jobs.evaluate)
        await runner.run(jobs.benchmark)
        await runner.run(jobs.report)
    return {"card": card, "stages": runner.documents()}
