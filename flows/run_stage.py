"""One stage as a flow run: shown in Prefect's pages, retried when the infrastructure fails.

python -m flows.run_stage tokenize --config tokenize.toml"""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported, which reads its environment
    from flows.cli.flow_commands import flow_main

    raise SystemExit(flow_main("run_stage"))

from typing import Any

from prefect import flow, get_run_logger

from flows.recipes.overrides import parse_text
from flows.recipes.stage_job import read_job, stage_job
from flows.runner.flow_errors import report_errors
from flows.runner.memory_check import plan_before, unchecked_layout
from flows.runner.run_name import of_stage
from flows.runner.stage_runner import StageRunner
from flows.yard.read_profile import DEFAULT
from flows.yard.registered_profile import yard_profile
from trainyard.errors import ConfigError
from trainyard.version import VERSION


@flow(name="run-stage", flow_run_name=of_stage, persist_result=False, version=VERSION)
@report_errors
async def run_stage(
    stage: str,
    config: str | None = None,
    options: str | dict[str, Any] | None = None,
    force: bool = False,
    yard: str | None = None,
    profile: str = DEFAULT,
) -> dict[str, Any]:
    """Run one stage from a config document, from options, or from a document with options over it.

    If the profile has gpu_memory_gib, a training is planned first. A layout that does not fit fails
    before the training is submitted.

    Args:
        stage: Name of the stage, a package under stages/.
        config: Path or URL of its options, a TOML, YAML or JSON document.
        options: Its options, as lines of KEY = VALUE or a table; a key is a flag with underscores.
            They override those of `config`.
        force: Run even if nothing changed.
        yard: Folder of the logs. Empty: variable YARD, else `store` of the profile, else `yard`.
        profile: Where the stage runs: the name of a profile; at a shell also a path."""
    if config is None and not options:
        raise ConfigError("run-stage needs config, a document of options, or options")
    site = await yard_profile(profile)
    written = read_job(stage, config).document if config is not None else {}
    where = config or f"options of {stage}"
    given = parse_text(options, where) if isinstance(options, str) else options or {}
    job = stage_job(stage, {**written, **given}, where)
    plan = plan_before(job, site.training_resources(), where)
    if remark := unchecked_layout(job, site, where):
        get_run_logger().warning("%s", remark)
    jobs, root = [one for one in (plan, job) if one is not None], site.yard_root(yard)
    forced = frozenset([job.name]) if force else frozenset[str]()
    async with StageRunner("run-stage", root, profile=site, alone=False, force=forced) as runner:
        await runner.expect(jobs)
        await runner.run(plan)
        await runner.run(job)
    return runner.documents()[-1]
