"""Raw text to a trained, resharded, evaluated and benchmarked GPT, from one recipe.

    python -m flows.pretrain_gpt recipes/quickstart.toml [--root DIR] [--verbose]

Needs no running server. A stage whose inputs, options and code did not change is reused."""

from __future__ import annotations

if __name__ == "__main__":  # before prefect is imported: it reads its environment when it is
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
        yard: Folder or URL under which all artifacts lie; unset: variable YARD, else that of the
            profile, else `yard`.
        profile: Where stages run: a file of deploy/yards, by its name or path.
        collect: Options that go over the recipe's [collect].
        train_tokenizer: Options that go over the recipe's [train_tokenizer].
        tokenize: Options that go over the recipe's [tokenize].
        merge: Options that go over the recipe's [merge].
        plan: Options that go over the recipe's [plan].
        pretrain: Options that go over the recipe's [pretrain].
        reshard: Options that go over the recipe's [reshard].
        evaluate: Options that go over the recipe's [evaluate].
        benchmark: Options that go over the recipe's [benchmark]."""
    place = await yard_profile(profile)
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
    written = read_recipe(recipe, place.yard_root(yard)).with_options(non_empty(tables))
    # What is wrong in the recipe is said before any waiting.
    checked = await asyncio.to_thread(pretrain_jobs, written, place.training_resources())
    if remark := unknown_gpu_memory(place, checked.plan):
        get_run_logger().warning("%s", remark)
    card = written.at("card.html")
    async with StageRunner("pretrain-gpt", written.root, card, profile=place) as line:
        # Anew: while another run had the turn files may have come, or a version of the corpus.
        jobs = await asyncio.to_thread(pretrain_jobs, written, place.training_resources())
        await line.expect(jobs.all())
        await line.run(jobs.plan, jobs.collect)  # a layout that fits nowhere ends here
        await line.run(jobs.train_tokenizer)
        await line.run(*jobs.tokenize)
        await line.drop_all_but(jobs.tokenize)
        await line.run(jobs.merge)
        await line.run(jobs.pretrain)
        await line.run(jobs.export, jobs.reshard)
        await line.run(jobs.evaluate)
        await line.run(jobs.benchmark)
        await line.run(jobs.report)
    return {"card": card, "stages": line.documents()}
