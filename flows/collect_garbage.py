"""Garbage collection of a yard as a flow, to run it on a schedule; see `python -m flows.gc`."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import acreate_table_artifact

from flows.gc.command import engines_of, homes_of
from flows.gc.policy import STANDARD, Policy
from flows.gc.report import lines, rows, size
from flows.gc.sweep import Swept, sweep
from flows.runner.flow_errors import report_errors
from flows.runner.run_name import of_sweep
from flows.yard.read_profile import DEFAULT
from flows.yard.registered_profile import yard_profile
from trainyard.charts.markdown import code
from trainyard.errors import InfrastructureError
from trainyard.version import VERSION

KEY = "garbage"


@flow(name="collect-garbage", flow_run_name=of_sweep, persist_result=False, version=VERSION)
@report_errors
async def collect_garbage(
    profile: str = DEFAULT,
    yard: str | None = None,
    remove: bool = False,
    keep_corpus_versions: int = STANDARD.keep_corpus_versions,
    corpus_days: float = STANDARD.corpus_days,
    claim_hours: float = STANDARD.claim_hours,
    upload_hours: float = STANDARD.upload_hours,
    attempt_days: float = STANDARD.attempt_days,
    keep_runs: int = STANDARD.keep_runs,
    run_days: float = STANDARD.run_days,
) -> dict[str, Any]:
    """List or remove superseded corpus versions, stale claims, abandoned uploads and attempts.

    An artifact from which another one in use was made always stays.

    Args:
        profile: The yard: the name of a profile; at a shell also a path.
        yard: Folder or URL of all artifacts; unset: variable YARD, else that of the profile, else
            `yard`.
        remove: Remove what is listed; unset: only list it.
        keep_corpus_versions: Number of newest versions of each corpus or index that always stay.
        corpus_days: Days that a superseded version stays.
        claim_hours: Hours after which an unrenewed claim counts as stale.
        upload_hours: Hours that incomplete uploads and temporary files stay.
        attempt_days: Days that unfinished work stays.
        keep_runs: Number of newest run folders of each job that always stay.
        run_days: Days that the other run folders stay."""
    policy = Policy(
        keep_corpus_versions=keep_corpus_versions,
        corpus_days=corpus_days,
        claim_hours=claim_hours,
        upload_hours=upload_hours,
        attempt_days=attempt_days,
        keep_runs=keep_runs,
        run_days=run_days,
    )
    site = await yard_profile(profile)
    root = site.yard_root(yard)
    homes, is_named = homes_of(site, root), bool(yard)
    engines = engines_of(site)
    swept = await asyncio.to_thread(sweep, root, homes, policy, remove, is_named, engines)
    log = get_run_logger()
    for line in lines(swept, not remove):
        log.info("%s", line)
    await _show(swept, not remove)
    if swept.failed:
        first, error = swept.failed[0]
        raise InfrastructureError(
            f"{len(swept.failed)} of {len(swept.plan.garbage)} could not be removed; the first, "
            f"{first.url}: {error}"
        )
    if swept.plan.unseen:
        raise InfrastructureError(swept.plan.unseen[0])
    return swept.to_document()


async def _show(swept: Swept, is_dry: bool) -> None:
    found = size(swept.plan.size_bytes) if swept.plan.garbage else "nothing"
    description = f"{found} to remove under {code(swept.plan.root)}"
    if is_dry and swept.plan.garbage:
        description += "; `remove` is off, so nothing was removed. The log lists the names"
    await acreate_table_artifact(key=KEY, table=rows(swept), description=description)


if __name__ == "__main__":
    from flows.gc.command import main

    raise SystemExit(main())
