"""Raw text to a trained, resharded, evaluated and benchmarked GPT, from one recipe.

    python -m flows.pretrain_gpt recipes/quickstart.toml [--yard DIR] [--verbose]

Needs no running server. A stage whose inputs, options and code did not change is reused."""

from __future__ import annotations

if __name__ == "__main__":  # before prefect is imported, which reads its environment then
    from flows.command import main

    raise SystemExit(main())

import asyncio
from collections.abc import Iterable
from typing import Any

from prefect import flow

from flows.artifacts import Board
from flows.job import StageJob
from flows.recipe import pretrain_jobs, read_recipe
from flows.stage_task import Place, Summary, run_stage_task
from flows.yard import place_of, remove_stale_parts

AT_ONCE = 2
"""Stages that run side by side: tokenizing, and writing the two other forms of a checkpoint."""


@flow(name="pretrain-gpt", flow_run_name="{recipe}", persist_result=False)
async def pretrain_gpt(
    recipe: str = "recipes/quickstart.toml", yard: str | None = None
) -> dict[str, Any]:
    """Collect, tokenize, pretrain, reshard, evaluate, benchmark, report.

    Args:
        recipe: TOML file with a table of options for each stage.
        yard: Folder or URL under which all artifacts lie; variable YARD, else `yard`."""
    written = read_recipe(recipe, yard)
    jobs = pretrain_jobs(written)
    line = Line(place_of(written.root), await Board.open(len(jobs.all())))

    await line.run(jobs.plan, jobs.collect)
    await line.run(jobs.train_tokenizer)
    await line.run(*jobs.tokenize)
    remove_stale_parts(written.at("tokens", "parts"), jobs.tokenize)
    await line.run(jobs.merge)
    await line.run(jobs.pretrain)
    await line.run(jobs.export, jobs.reshard)
    await line.run(jobs.evaluate)
    await line.run(jobs.benchmark)
    await line.run(jobs.report)

    card = written.at("card.html")
    await line.board.finish(card)
    return {"card": card, "stages": [summary.to_document() for summary in line.board.summaries]}


class Line:
    """The stages of one flow run, one after another or a few at a time."""

    def __init__(self, place: Place, board: Board) -> None:
        self.place = place
        self.board = board
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def run(self, *jobs: StageJob | None) -> None:
        """Run jobs that do not wait for each other; when one fails, the others are stopped."""
        tasks = [self._one(job) for job in jobs if job is not None]
        try:
            await _all(tasks)
        except BaseExceptionGroup as group:
            raise _first(group) from group

    async def _one(self, job: StageJob) -> Summary:
        async with self._slots:
            summary = await run_stage_task(job, self.place)
        await self.board.add(summary)
        return summary


async def _all(work: Iterable[Any]) -> None:
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that stopped the others."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
