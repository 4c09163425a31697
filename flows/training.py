"""How the flows that train a model run: all but their parameters and the stages they run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from prefect import get_run_logger

from flows.prepare_corpus import make_tokens
from flows.recipes.force import forced_names
from flows.recipes.inputs import check_inputs
from flows.recipes.masked import MaskedJobs, masked_jobs
from flows.recipes.overrides import TOP_LEVEL, read_overrides
from flows.recipes.recipe import Recipe, read_recipe
from flows.recipes.stage_job import StageJob
from flows.runner.memory_check import unknown_gpu_memory
from flows.runner.stage_runner import StageRunner
from flows.yard.profile import TrainingResources
from flows.yard.registered_profile import yard_profile

OF_RUN = ("recipe", "force", "overrides", "yard", "profile")
"""Parameters of every flow here; the others override options of its recipe."""


class Jobs(Protocol):
    """The jobs of a flow."""

    def all(self) -> list[StageJob]:
        """Every job."""


J = TypeVar("J", bound=Jobs)


async def run_training(
    flow: str,
    given: Mapping[str, Any],
    derive: Callable[[Recipe, TrainingResources], J],
    run_stages: Callable[[StageRunner, J], Awaitable[None]],
    table: str = "pretrain",
) -> dict[str, Any]:
    """Run a flow that trains a model; its result.

    given: the flow's parameters by name: locals() as its body begins. derive: checks a recipe and
    gives its jobs. run_stages: runs them in order. table: that of the recipe whose options are
    parameters of the flow. Raises ConfigError for wrong options, ArtifactError for a missing file,
    both before any stage runs."""
    site = await yard_profile(given["profile"])
    options = {name: value for name, value in given.items() if name not in OF_RUN}
    above = {name: options.pop(name) for name in TOP_LEVEL if name in options}
    filled_in = read_overrides(flow, given["overrides"], **above, **{table: options})
    written = read_recipe(given["recipe"], site.yard_root(given["yard"])).with_options(filled_in)
    # A wrong recipe fails before any waiting.
    checked = await asyncio.to_thread(derive, written, site.training_resources())
    await asyncio.to_thread(check_inputs, written, checked.all(), site.backend)
    forced = forced_names(given["force"], checked.all())
    for plan in (job for job in checked.all() if job.stage == "plan"):
        if remark := unknown_gpu_memory(site, plan):
            get_run_logger().warning("%s", remark)
    card = written.at("card.html")
    async with StageRunner(flow, written.root, card, profile=site, force=forced) as runner:
        # Derive the jobs again: another run that had the lock may have added files, a version of
        # the corpus, or a step of the checkpoint to start from.
        jobs = await asyncio.to_thread(derive, written, site.training_resources())
        await runner.expect(jobs.all())
        await run_stages(runner, jobs)
    return {"card": card, "stages": runner.documents()}


async def train_masked(flow: str, family: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run a flow that trains a BERT or a T5. family: --model-type. given: as in run_training."""
    return await run_training(
        flow,
        given,
        lambda recipe, resources: masked_jobs(recipe, family, resources),
        _run_masked,
    )


async def _run_masked(runner: StageRunner, jobs: MaskedJobs) -> None:
    await runner.run(jobs.plan)  # a layout that does not fit fails here
    await make_tokens(runner, jobs.corpus)
    await runner.run(jobs.pretrain)
    await runner.run(jobs.report)
