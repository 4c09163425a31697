"""One stage, as a flow run: seen in Prefect's pages, retried when the infrastructure failed.

python -m flows.run_stage tokenize --config tokenize.toml"""

from __future__ import annotations

if __name__ == "__main__":  # before prefect is imported: it reads its environment when it is
    from flows.command import run_stage_main

    raise SystemExit(run_stage_main())

from typing import Any

from prefect import flow

from flows.job import read_job
from flows.line import Line
from flows.recipe import yard_root


@flow(name="run-stage", flow_run_name="{stage}", persist_result=False)
async def run_stage(stage: str, config: str, yard: str | None = None) -> dict[str, Any]:
    """Run one stage from a config document.

    Args:
        stage: Name of the stage, a package under stages/.
        config: Path or URL of its options, a TOML, YAML or JSON document.
        yard: Folder under which logs lie; unset: variable YARD, else `yard`."""
    job = read_job(stage, config)
    async with Line("run-stage", yard_root(yard), [job]) as line:
        await line.run(job)
    return line.documents()[0]
