"""Prepares a checkpoint for release: another layout, a Hugging Face folder, metrics, a card.

    python -m flows.release recipes/quickstart.toml [--checkpoint URL] [--root DIR] [--profile NAME]

Without --checkpoint it uses the checkpoint that pretrain_gpt made from the recipe, and reuses what
exists already. The output for another checkpoint goes to releases/NAME under the root. A checkpoint
whose engines give other log-probabilities than its training is not released."""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported, which reads its environment
    from flows.cli.flow_commands import flow_main

    raise SystemExit(flow_main("release"))

import asyncio
from typing import Any

from prefect import flow

from flows.pages.parity_page import show_parity
from flows.recipes.force import forced_names
from flows.recipes.inputs import check_inputs
from flows.recipes.overrides import read_overrides
from flows.recipes.recipe import read_recipe
from flows.recipes.release import check_checkpoint, release_jobs
from flows.runner.flow_errors import report_errors
from flows.runner.run_name import of_recipe
from flows.runner.stage_runner import StageRunner
from flows.yard.read_profile import DEFAULT
from flows.yard.registered_profile import yard_profile
from trainyard.version import VERSION


@flow(name="release", flow_run_name=of_recipe, persist_result=False, version=VERSION)
@report_errors
async def release(
    recipe: str = "recipes/quickstart.toml",
    checkpoint: str | None = None,
    evaluation_data: str | None = None,
    num_shards: int | None = None,
    num_tokens_to_generate: int | None = None,
    force: str | None = None,
    overrides: str | None = None,
    yard: str | None = None,
    profile: str = DEFAULT,
) -> dict[str, Any]:
    """Reshard, compare training and serving, export, evaluate and benchmark a checkpoint.

    Args:
        recipe: TOML file whose [reshard], [parity], [evaluate], [benchmark] and [report] are used,
            of the sources or by path or URL.
        checkpoint: Run folder or step folder. Empty: the checkpoint of the recipe.
        evaluation_data: Text to evaluate on. Empty: as the recipe says.
        num_shards: Files of the resharded checkpoint. Empty: as the recipe says.
        num_tokens_to_generate: Tokens for each prompt of the benchmark. Empty: as the recipe says.
        force: Stages that run even if nothing changed, such as `export evaluate`; `all`: every one.
            Empty: none.
        overrides: More options, as lines of STAGE.KEY = VALUE or as in a recipe, such as
            `evaluate.overlapping_eval = 32`.
        yard: Folder or URL of all artifacts. Empty: variable YARD, else `store` of the profile,
            else `yard`.
        profile: Where stages run: the name of a profile; at a shell also a path."""
    site = await yard_profile(profile)
    given = read_overrides(
        "release",
        overrides,
        evaluation_data=evaluation_data,
        reshard={"num_shards": num_shards},
        benchmark={"num_tokens_to_generate": num_tokens_to_generate},
    )
    written = read_recipe(recipe, site.yard_root(yard)).with_options(given)
    jobs = release_jobs(written, checkpoint)
    await asyncio.to_thread(check_inputs, written, [jobs.evaluate], site.backend)
    forced = forced_names(force, jobs.all())
    async with StageRunner("release", written.root, profile=site, force=forced) as runner:
        await runner.expect(jobs.all())
        # Check under the lock: a training of this recipe that had it may have written it.
        await asyncio.to_thread(check_checkpoint, written, checkpoint, site.backend)
        await runner.run(jobs.reshard)
        await runner.run(jobs.parity)  # before anything that others may take
        await show_parity(jobs.parity.document["output_dir"])
        await runner.run(jobs.export)
        await runner.run(jobs.evaluate)
        await runner.run(jobs.benchmark)  # alone: it measures times
        await runner.run(jobs.card)
    return {"export": jobs.export.document["save_dir"], "stages": runner.documents()}
