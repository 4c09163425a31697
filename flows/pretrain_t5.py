"""Turns raw text into a trained T5, by one recipe.

    python -m flows.pretrain_t5 recipes/t5_quickstart.toml [--root DIR] [--verbose]

Needs no running server. A stage whose inputs, options and code did not change is reused."""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported, which reads its environment
    from flows.cli.flow_commands import flow_main

    raise SystemExit(flow_main("pretrain_t5"))

import asyncio
from typing import Any

from prefect import flow, get_run_logger

from flows.prepare_corpus import make_tokens
from flows.recipes.force import forced_names
from flows.recipes.inputs import check_inputs
from flows.recipes.masked import masked_jobs
from flows.recipes.overrides import AS_RECIPE, Choice, read_overrides
from flows.recipes.recipe import read_recipe
from flows.runner.flow_errors import report_errors
from flows.runner.memory_check import unknown_gpu_memory
from flows.runner.run_name import of_recipe
from flows.runner.stage_runner import StageRunner
from flows.yard.read_profile import DEFAULT
from flows.yard.registered_profile import yard_profile
from trainyard.version import VERSION

FAMILY = "t5"


@flow(name="pretrain-t5", flow_run_name=of_recipe, persist_result=False, version=VERSION)
@report_errors
async def pretrain_t5(
    recipe: str = "recipes/t5_quickstart.toml",
    train_iters: int | None = None,
    lr: float | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    seed: int | None = None,
    bf16: Choice = AS_RECIPE,
    tokens: str | None = None,
    load: str | None = None,
    save_interval: int | None = None,
    eval_interval: int | None = None,
    force: str | None = None,
    overrides: str | None = None,
    yard: str | None = None,
    profile: str = DEFAULT,
) -> dict[str, Any]:
    """Collect, split into sentences, tokenize, pretrain, report.

    Args:
        recipe: TOML file with a table of options for each stage, of the sources or by path or URL.
        train_iters: Steps of the training. Empty: as the recipe says.
        lr: Peak learning rate. Empty: as the recipe says.
        global_batch_size: Samples per step. Empty: as the recipe says.
        micro_batch_size: Samples per micro-batch on a rank. Empty: as the recipe says.
        seed: Of weights, dropout and order of samples. Empty: as the recipe says.
        bf16: Train in bfloat16.
        tokens: Prefix of token files of sentences. Empty: as the recipe says.
        load: Checkpoint to start from. Empty: as the recipe says.
        save_interval: Steps between checkpoints. Empty: as the recipe says.
        eval_interval: Steps between validations. Empty: as the recipe says.
        force: Stages that run even if nothing changed, such as `pretrain report`; `all`: every
            one. Empty: none.
        overrides: More options, as lines of STAGE.KEY = VALUE or as in a recipe, such as
            `pretrain.mask_prob = 0.2`.
        yard: Folder or URL of all artifacts, checkpoints (`save`) too. Empty: variable YARD, else
            `store` of the profile, else `yard`.
        profile: Where stages run: the name of a profile; at a shell also a path."""
    site = await yard_profile(profile)
    given = read_overrides(
        "pretrain-t5",
        overrides,
        tokens=tokens,
        pretrain={
            "train_iters": train_iters,
            "lr": lr,
            "global_batch_size": global_batch_size,
            "micro_batch_size": micro_batch_size,
            "seed": seed,
            "bf16": bf16,
            "load": load,
            "save_interval": save_interval,
            "eval_interval": eval_interval,
        },
    )
    written = read_recipe(recipe, site.yard_root(yard)).with_options(given)
    # A wrong recipe fails before any waiting.
    checked = await asyncio.to_thread(masked_jobs, written, FAMILY, site.training_resources())
    await asyncio.to_thread(check_inputs, written, checked.all(), site.backend)
    forced = forced_names(force, checked.all())
    if remark := unknown_gpu_memory(site, checked.plan):
        get_run_logger().warning("%s", remark)
    card = written.at("card.html")
    async with StageRunner("pretrain-t5", written.root, card, profile=site, force=forced) as runner:
        # Derive the jobs again: another run that had the lock may have added files or a version.
        jobs = await asyncio.to_thread(masked_jobs, written, FAMILY, site.training_resources())
        await runner.expect(jobs.all())
        await runner.run(jobs.plan)  # a layout that does not fit fails here
        await make_tokens(runner, jobs.corpus)
        await runner.run(jobs.pretrain)
        await runner.run(jobs.report)
    return {"card": card, "stages": runner.documents()}
