"""Makes what a trained GPT writes less toxic, by its own texts (SGEAT, arXiv:2202.04173), by one
recipe.

    python -m flows.detoxify_gpt recipes/detoxify_quickstart.toml [--root DIR] [--verbose]

Needs no running server. A stage whose inputs, options and code did not change is reused."""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported, which reads its environment
    from flows.cli.flow_commands import flow_main

    raise SystemExit(flow_main("detoxify_gpt"))

from typing import Any

from prefect import flow

from flows.recipes.detoxify import DetoxifyJobs, Measures, detoxify_jobs
from flows.recipes.overrides import AS_RECIPE, Choice
from flows.runner.flow_errors import report_errors
from flows.runner.run_name import of_recipe
from flows.runner.stage_runner import StageRunner
from flows.training import run_training
from flows.yard.read_profile import DEFAULT
from trainyard.version import VERSION


@flow(name="detoxify-gpt", flow_run_name=of_recipe, persist_result=False, version=VERSION)
@report_errors
async def detoxify_gpt(
    recipe: str = "recipes/detoxify_quickstart.toml",
    base: str | None = None,
    load: str | None = None,
    save: str | None = None,
    evaluation_data: str | None = None,
    train_iters: int | None = None,
    lr: float | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    seed: int | None = None,
    bf16: Choice = AS_RECIPE,
    force: str | None = None,
    overrides: str | None = None,
    yard: str | None = None,
    profile: str = DEFAULT,
) -> dict[str, Any]:
    """Measure, generate, keep the least toxic texts, train on them, measure again, report.

    Args:
        recipe: TOML file with a table of options for each stage, of the sources or by path or URL.
        base: Recipe whose trained model is detoxified, by its name in the yard. Empty: as the
            recipe says.
        load: Checkpoint to begin with, instead of a base. Empty: as the recipe says.
        save: Folder or URL of the checkpoints, which the later stages read too. Empty: as the
            recipe says, else NAME/checkpoint in `yard`.
        evaluation_data: Text to measure the perplexity on. Empty: as the recipe says, else that of
            the base.
        train_iters: Steps of the training. Empty: as the recipe says.
        lr: Peak learning rate. Empty: as the recipe says.
        global_batch_size: Samples per step. Empty: as the recipe says.
        micro_batch_size: Samples per micro-batch on a rank. Empty: as the recipe says.
        seed: Of dropout and order of samples. Empty: as the recipe says.
        bf16: Train in bfloat16.
        force: Stages that run even if nothing changed, such as `pretrain report`; `all`: every
            one. Empty: none.
        overrides: More options, as lines of STAGE.KEY = VALUE or as in a recipe, such as
            `score.keep_fraction = 0.25`.
        yard: Folder or URL of all artifacts. Empty: variable YARD, else `store` of the profile,
            else `yard`.
        profile: Where stages run: the name of a profile; at a shell also a path."""
    return await run_training("detoxify-gpt", locals(), detoxify_jobs, _run_stages)


async def _run_stages(runner: StageRunner, jobs: DetoxifyJobs) -> None:
    await _measure(runner, jobs.before)
    await runner.run(jobs.generate)
    await runner.run(jobs.score)
    await runner.run(jobs.tokenize)
    await runner.run(jobs.pretrain)
    await _measure(runner, jobs.after)
    await runner.run(jobs.report)


async def _measure(runner: StageRunner, jobs: Measures) -> None:
    await runner.run(jobs.generate)
    await runner.run(jobs.score)
    await runner.run(jobs.evaluate)
