"""Raw text to a trained, resharded, evaluated and benchmarked GPT, from one recipe.

    python -m flows.pretrain_gpt recipes/quickstart.toml [--yard DIR] [--verbose]

Needs no running server. A stage whose inputs, options and code did not change is reused."""

from __future__ import annotations

if __name__ == "__main__":  # before prefect is imported: it reads its environment when it is
    from flows.command import pretrain_gpt_main

    raise SystemExit(pretrain_gpt_main())

from typing import Any

from prefect import flow

from flows.line import Line
from flows.pretrain_jobs import pretrain_jobs
from flows.recipe import read_recipe


@flow(name="pretrain-gpt", flow_run_name="{recipe}", persist_result=False)
async def pretrain_gpt(
    recipe: str = "recipes/quickstart.toml", yard: str | None = None
) -> dict[str, Any]:
    """Collect, tokenize, pretrain, reshard, evaluate, benchmark, report.

    Args:
        recipe: TOML file with a table of options for each stage.
        yard: Folder or URL under which all artifacts lie; unset: variable YARD, else `yard`."""
    written = read_recipe(recipe, yard)
    jobs = pretrain_jobs(written)
    card = written.at("card.html")
    async with Line("pretrain-gpt", written.root, jobs.all(), card) as line:
        await line.run(jobs.plan, jobs.collect)
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
