"""Prefect's pages of one stage: inputs, output, why it ran, and what was submitted.

A page that cannot be written is logged as a warning; the run continues."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import PrefectException

from flows.backends.container.render import SCRIPT as DOCKER_RUN
from flows.backends.kubernetes.manifests import MANIFESTS
from flows.backends.outcome import BRIEF_CHARS, Outcome, brief
from flows.backends.slurm.script import SCRIPT as SBATCH
from flows.backends.spec import LaunchSpec
from trainyard.artifacts.manifest import InputRecord, Manifest, read_manifest
from trainyard.charts.markdown import code, code_block
from trainyard.errors import TrainyardError
from trainyard.logging import printable

if TYPE_CHECKING:
    from flows.recipes.summary import Summary

log = logging.getLogger(__name__)

DIGEST_CHARS = 12
MAX_URLS = 3
"""URLs of an input that a page shows; a corpus has thousands."""

SUBMITTED = {SBATCH: "bash", DOCKER_RUN: "bash", MANIFESTS: "yaml"}
"""Files of a run folder with the request that a backend submitted, and the language of each."""

Row = dict[str, str]


def has_pages() -> bool:
    """Whether this runs within a flow or a task of Prefect."""
    return TaskRunContext.get() is not None or FlowRunContext.get() is not None


async def shown(page: Awaitable[Any]) -> Any:
    """Write a page and return its result; if that fails, log a warning and return None."""
    try:
        return await page
    except (httpx.HTTPError, OSError, PrefectException, TrainyardError) as error:
        log.warning("could not write a page of this run: %s", reason_of(error))
        return None


def reason_of(error: BaseException) -> str:
    """The error as one line. Of an HTTP answer of Prefect's server it is only the message, without
    the address, the body and a link that Prefect adds."""
    if not isinstance(error, httpx.HTTPStatusError):
        return f"{type(error).__name__}: {brief(str(error))}"
    answer = error.response
    try:
        message = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        message = None
    if isinstance(message, str) and message:
        return brief(message, 2 * BRIEF_CHARS)  # it ends with what to do
    return f"Prefect's server answered {answer.status_code} {answer.reason_phrase}".rstrip()


def page_key(*names: str) -> str:
    """Prefect's key of a page: all versions of the page have it."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-")


# --- submitted script ---------------------------------------------------------------------------


async def show_submitted(spec: LaunchSpec) -> None:
    """Show the script of a job, which a person can run again."""
    if has_pages():
        key, text = page_key(spec.name, "script"), submitted(spec)
        await shown(acreate_markdown_artifact(text, key=key, description="Submitted"))


def submitted(spec: LaunchSpec) -> str:
    """Markdown: the file that a backend submitted, or the command of a process."""
    for name, language in SUBMITTED.items():
        path = Path(spec.run_directory, name)
        if path.exists():
            return f"{code(str(path))}\n\n{code_block(path.read_text(), language)}"
    return code_block(shell_command(spec), "bash")


def shell_command(spec: LaunchSpec) -> str:
    """The command of a process on this machine, as shell commands."""
    folder = spec.working_directory or os.getcwd()
    variables = [f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()]
    return "\n".join([f"cd {shlex.quote(folder)}", *variables, shlex.join(spec.command)]) + "\n"


# --- result -------------------------------------------------------------------------------------


async def show_stage(summary: Summary) -> None:
    """Show the table of a stage that finished."""
    if has_pages():
        await shown(_show_stage(summary))


async def _show_stage(summary: Summary) -> None:
    manifest = None
    if summary.manifest_url:
        found = await asyncio.to_thread(read_manifest, summary.manifest_url)
        manifest = found[0] if found else None
    await acreate_table_artifact(
        table=stage_rows(summary, manifest),
        key=page_key(summary.job, "stage"),
        description=f"Stage {code(summary.stage)}: {'reused' if summary.reused else 'done'}",
    )


async def show_failed(stage: str, outcome: Outcome, seconds: float, log: str) -> None:
    """Show the table of an attempt that failed."""
    if has_pages():
        page = acreate_table_artifact(
            table=failed_rows(stage, outcome, seconds, log),
            key=page_key(outcome.name, "stage"),
            description=f"Stage {code(stage)}: failed, {outcome.kind}",
        )
        await shown(page)


async def show_waiting(stage: str, spec: LaunchSpec, state: str, message: str = "") -> None:
    """Show the table of a stage whose backend is unavailable (message: why), or answers again."""
    if has_pages():
        rows = [_row(f"stage {stage}", state)]
        rows += [_row("message", message)] if message else []
        key = page_key(spec.name, "stage")
        description = f"Stage {code(stage)}: {'waits' if message else 'runs'}"
        await shown(acreate_table_artifact(table=rows, key=key, description=description))


def failed_rows(stage: str, outcome: Outcome, seconds: float, log: str) -> list[Row]:
    """The table: kind of failure, message, last step, log."""
    rows = [_row(f"stage {stage}", f"failed after {seconds:.1f} s: {outcome.kind}")]
    if outcome.message:
        rows.append(_row("message", outcome.message))
    if outcome.error:
        rows.append(_row("error", outcome.error))
    if outcome.step is not None:
        rows.append(_row("last finished step", f"{outcome.step:,}"))
    if outcome.failed_shares:
        rows.append(_row("shares that failed", ", ".join(map(str, outcome.failed_shares))))
    return [*rows, _row("log", log)] if log else rows


def stage_rows(summary: Summary, manifest: Manifest | None) -> list[Row]:
    """The table: result, inputs, output, metrics."""
    result = "reused: nothing had changed" if summary.reused else f"done in {summary.seconds:.1f} s"
    rows = [_row(f"stage {summary.stage}", result)]
    if summary.reason:
        rows.append(_row("why it ran", summary.reason))
    if manifest is not None:
        rows += [_input(name, record) for name, record in sorted(manifest.inputs.items())]
        rows.append(_row("output", summary.manifest_url, manifest.output_digest))
        size = f"{manifest.size_bytes:,} bytes together"
        rows.append(_row("files", f"{manifest.num_files:,}, of {size}"))
        code = manifest.code
        rows.append(_row("code", f"trainyard {code.get('version', '')}", code.get("digest", "")))
    rows += [_row(f"metric {name}", _value(value)) for name, value in summary.metrics.items()]
    rows.append(_row("log", summary.log))
    return rows


def _row(what: str, value: str, digest: str = "") -> Row:
    cells = {"what": what, "digest": digest[:DIGEST_CHARS], "value": value}
    return {name: printable(cell) for name, cell in cells.items()}


def _input(name: str, record: InputRecord) -> Row:
    more = len(record.urls) - MAX_URLS
    urls = ", ".join(record.urls[:MAX_URLS]) + (f" and {more:,} more" if more > 0 else "")
    return _row(f"input {name}", urls, record.digest)


def _value(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return number(value)


def number(value: float) -> str:
    """A metric as text."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
