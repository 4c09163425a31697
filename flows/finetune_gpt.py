"""Tunes a trained GPT on instruction data, by one recipe.

    python -m flows.finetune_gpt recipes/finetune_quickstart.toml [--root DIR] [--verbose]

Needs no running server. A stage whose inputs, options and code did not change is reused."""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported, which reads its environment
    from flows.cli.flow_commands import flow_main

    raise SystemExit(flow_main("finetune_gpt"))

from typing import Any

from prefect import flow

from flows.recipes.finetune import FinetuneJobs, finetune_jobs
from flows.recipes.overrides import AS_RECIPE, Choice
from flows.recipes.recipe import FINETUNE
from flows.runner.flow_errors import report_errors
from flows.runner.run_name import of_recipe
from flows.runner.stage_runner import StageRunner
from flows.training import run_training
from flows.yard.read_profile import DEFAULT
from trainyard.version import VERSION


@flow(name="finetune-gpt", flow_run_name=of_recipe, persist_result=False, version=VERSION)
@report_errors
async def finetune_gpt(
    recipe: str = "recipes/finetune_quickstart.toml",
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
    save_interval: int | None = None,
    eval_interval: int | None = None,
    force: str | None = None,
    overrides: str | None = None,
    yard: str | None = None,
    profile: str = DEFAULT,
) -> dict[str, Any]:
    """Collect instructions, finetune, evaluate, generate answers, report.

    Args:
        recipe: TOML file with a table of options for each stage, of the sources or by path or URL.
        base: Recipe whose trained model is tuned, by its name in the yard. Empty: as the recipe
            says.
        load: Checkpoint to tune, instead of a base. Empty: as the recipe says.
        save: Folder or URL of the checkpoints, which the later stages read too. Empty: as the
            recipe says, else NAME/checkpoint in `yard`.
        evaluation_data: Questions to answer. Empty: as the recipe says.
        train_iters: Steps of the tuning. Empty: as the recipe says.
        lr: Peak learning rate. Empty: as the recipe says.
        global_batch_size: Samples per step. Empty: as the recipe says.
        micro_batch_size: Samples per micro-batch on a rank. Empty: as the recipe says.
        seed: Of dropout and order of samples. Empty: as the recipe says.
        bf16: Train in bfloat16.
        save_interval: Steps between checkpoints. Empty: as the recipe says.
        eval_interval: Steps between validations. Empty: as the recipe says.
        force: Stages that run even if nothing changed, such as `finetune report`; `all`: every
            one. Empty: none.
        overrides: More options, as lines of STAGE.KEY = VALUE or as in a recipe, such as
            `finetune.sft_packing = lines`.
        yard: Folder or URL of all artifacts. Empty: variable YARD, else `store` of the profile,
            else `yard`.
        profile: Where stages run: the name of a profile; at a shell also a path."""
    return await run_training("finetune-gpt", locals(), finetune_jobs, _run_stages, FINETUNE)


async def _run_stages(runner: StageRunner, jobs: FinetuneJobs) -> None:
    await runner.run(jobs.collect)
    await runner.run(jobs.finetune)
    await runner.run(jobs.evaluate)
    await runner.run(jobs.benchmark)
    await runner.run(jobs.report)
