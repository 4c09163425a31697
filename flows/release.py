"""Prepares a checkpoint for release: another layout, a Hugging Face folder, metrics.

    python -m flows.release recipes/quickstart.toml [--checkpoint URL] [--root DIR] [--profile NAME]

Without --checkpoint it uses the checkpoint that pretrain_gpt made from the recipe, and reuses what
exists already. The output for another checkpoint goes to releases/NAME under the root."""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported, which reads its environment
    from flows.cli.flow_commands import flow_main

    raise SystemExit(flow_main("release"))

import asyncio
from typing import Any

from prefect import flow

from flows.recipes.form_schema import EMPTY, Benchmark, Evaluate, Reshard, non_empty
from flows.recipes.recipe import read_recipe
from flows.recipes.release import check_checkpoint, release_jobs
from flows.runner.flow_errors import report_errors
from flows.runner.stage_runner import StageRunner
from flows.yard.read_profile import DEFAULT
from flows.yard.registered_profile import yard_profile
from trainyard.version import VERSION


@flow(name="release", flow_run_name="{recipe}", persist_result=False, version=VERSION)
@report_errors
async def release(
    recipe: str = "recipes/quickstart.toml",
    checkpoint: str | None = None,
    yard: str | None = None,
    profile: str = DEFAULT,
    reshard: Reshard = EMPTY,
    evaluate: Evaluate = EMPTY,
    benchmark: Benchmark = EMPTY,
) -> dict[str, Any]:
    """Reshard, export, evaluate and benchmark a checkpoint.

    Args:
        recipe: TOML file or URL; its [reshard], [evaluate] and [benchmark] are used.
        checkpoint: Run folder or step folder; unset: the one of the recipe.
        yard: Folder or URL of all artifacts; unset: variable YARD, else that of the profile, else
            `yard`.
        profile: Where stages run: the name of a profile; at a shell also a path.
        reshard: Options that override the recipe's [reshard].
        evaluate: Options that override the recipe's [evaluate].
        benchmark: Options that override the recipe's [benchmark]."""
    site = await yard_profile(profile)
    tables = {"reshard": reshard, "evaluate": evaluate, "benchmark": benchmark}
    written = read_recipe(recipe, site.yard_root(yard)).with_options(non_empty(tables))
    jobs = release_jobs(written, checkpoint)
    async with StageRunner("release", written.root, profile=site) as runner:
        await runner.expect(jobs.all())
        # Check under the lock: a training of this recipe that had it may have written it.
        await asyncio.to_thread(check_checkpoint, written, checkpoint, site.backend)
        await runner.run(jobs.reshard, jobs.export)
        await runner.run(jobs.evaluate)
        await runner.run(jobs.benchmark)  # alone: it measures times
    return {"export": jobs.export.document["save_dir"], "stages": runner.documents()}
