"""Turns raw text into a trained, resharded, evaluated and benchmarked GPT, by one recipe.

    python -m flows.pretrain_gpt recipes/quickstart.toml [--root DIR] [--verbose]

Needs no running server. A stage whose inputs, options and code did not change is reused."""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported, which reads its environment
    from flows.cli.flow_commands import flow_main

    raise SystemExit(flow_main("pretrain_gpt"))

from typing import Any

from prefect import flow

from flows.recipes.overrides import AS_RECIPE, Choice
from flows.recipes.pretrain import PretrainJobs, pretrain_jobs
from flows.runner.flow_errors import report_errors
from flows.runner.run_name import of_recipe
from flows.runner.stage_runner import StageRunner
from flows.training import run_training
from flows.yard.read_profile import DEFAULT
from trainyard.version import VERSION


@flow(name="pretrain-gpt", flow_run_name=of_recipe, persist_result=False, version=VERSION)
@report_errors
async def pretrain_gpt(
    recipe: str = "recipes/quickstart.toml",
    train_iters: int | None = None,
    lr: float | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    seed: int | None = None,
    bf16: Choice = AS_RECIPE,
    tokens: str | None = None,
    evaluation_data: str | None = None,
    load: str | None = None,
    save: str | None = None,
    save_interval: int | None = None,
    eval_interval: int | None = None,
    log_interval: int | None = None,
    force: str | None = None,
    overrides: str | None = None,
    yard: str | None = None,
    profile: str = DEFAULT,
) -> dict[str, Any]:
    """Collect, tokenize, pretrain, reshard, evaluate, benchmark, report.

    Args:
        recipe: TOML file with a table of options for each stage, of the sources or by path or URL.
        train_iters: Steps of the training. Empty: as the recipe says.
        lr: Peak learning rate. Empty: as the recipe says.
        global_batch_size: Sequences per step. Empty: as the recipe says.
        micro_batch_size: Sequences per micro-batch on a rank. Empty: as the recipe says.
        seed: Of weights, dropout and order of samples. Empty: as the recipe says.
        bf16: Train in bfloat16.
        tokens: Prefix of token files, or pointer of corpus-refresh. Empty: as the recipe says.
        evaluation_data: Text to evaluate on. Empty: as the recipe says.
        load: Checkpoint to start from. Empty: as the recipe says.
        save: Folder or URL of the checkpoints, which the later stages read too. Empty: as the
            recipe says, else NAME/checkpoint in `yard`.
        save_interval: Steps between checkpoints. Empty: as the recipe says.
        eval_interval: Steps between validations. Empty: as the recipe says.
        log_interval: Steps between log lines. Empty: as the recipe says.
        force: Stages that run even if nothing changed, such as `pretrain evaluate`; `all`: every
            one. Empty: none.
        overrides: More options, as lines of STAGE.KEY = VALUE or as in a recipe, such as
            `pretrain.clip_grad = 0.5`.
        yard: Folder or URL of all artifacts. Empty: variable YARD, else `store` of the profile,
            else `yard`.
        profile: Where stages run: the name of a profile; at a shell also a path."""
    return await run_training("pretrain-gpt", locals(), pretrain_jobs, _run_stages)


async def _run_stages(runner: StageRunner, jobs: PretrainJobs) -> None:
    await runner.run(jobs.plan, jobs.collect)  # a layout that does not fit fails here
    await runner.run(jobs.train_tokenizer)
    await runner.run_for_files(jobs.tokenize)
    await runner.drop_all_but(jobs.tokenize)
    await runner.run(jobs.merge)
    await runner.run(jobs.pretrain)
    await runner.run(jobs.export, jobs.reshard)
    await runner.run(jobs.evaluate)
    await runner.run(jobs.benchmark)
    await runner.run(jobs.report)
