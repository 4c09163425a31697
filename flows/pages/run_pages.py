"""Prefect's pages of a flow run: progress, stages, loss, goodput, lineage, run card, failure."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.artifacts import (
    acreate_image_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    aupdate_progress_artifact,
)
from prefect.context import FlowRunContext

from flows.backends.outcome import BRIEF_CHARS, brief
from flows.goodput.report import goodput_url, markdown, record_goodput
from flows.pages.charts import data_url, lineage_page, loss_curve, read_lineage
from flows.pages.stage_pages import number, page_key, shown
from flows.yard.links import BROWSE, how_to_open, link_to
from trainyard.artifacts import store
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import is_web, join, parent
from trainyard.charts.markdown import code, escape
from trainyard.logging import printable, shortened

if TYPE_CHECKING:
    from flows.recipes.stage_job import StageJob
    from flows.recipes.summary import Summary

SHOWN_METRICS = 4

PERPLEXITY = ("validation perplexity, per token", "perplexity")
TOKENS, PARAMETERS = ("tokens", "tokens"), ("parameters", "parameters")

TRAINED = "pretrain"
"""The stage with a loss and a goodput account."""
LEDGER = "ledger.jsonl"


class RunPages:
    """The pages of one run. They grow as stages end; the last are written when the run ends."""

    def __init__(
        self,
        flow: str,
        card: str = "",
        root: str = "",
        runs: str = "",
        browsed: str = "",
    ) -> None:
        """card: URL of the run card; root: URL of all artifacts; runs: folder of run folders;
        browsed: `PREFIX=URL`, the web address of files below a prefix."""
        self.summaries: list[Summary] = []
        self._flow = flow
        self._jobs: Sequence[StageJob] = ()
        self._card, self._root, self._runs, self._browsed = card, root, runs, browsed
        self._progress: UUID | None = None

    async def open(self) -> None:
        """Start the progress bar at 0 %."""
        key = page_key(self._flow, "progress")
        self._progress = await shown(
            acreate_progress_artifact(0.0, key=key, description="Stages done")
        )

    def expect(self, jobs: Sequence[StageJob]) -> None:
        """Set the stages that will run."""
        self._jobs = jobs

    async def add(self, summary: Summary) -> None:
        """Add a stage that finished."""
        self.summaries.append(summary)
        if self._progress is not None:
            done = sum(one.num_runs for one in self.summaries)
            share = 100.0 * done / max(len(self._jobs), 1)
            await shown(aupdate_progress_artifact(self._progress, progress=share))
        if summary.stage == TRAINED and summary.manifest_url:
            await shown(self._show_loss(summary))
            output = Output.directory(parent(summary.manifest_url))
            await shown(self._show_goodput(summary.job, output))

    async def close(self, error: BaseException | None) -> None:
        """Write the pages of the ended run; error: why it failed, None if it did not."""
        table = stage_table(self.summaries)
        if error is not None:
            table = (
                f"**Failed:** {escape(brief(printable(str(error)), 2 * BRIEF_CHARS))}\n\n{table}"
            )
            for job in self._jobs:
                is_done = any(summary.job == job.name for summary in self.summaries)
                if job.stage == TRAINED and job.output is not None and not is_done:
                    await shown(self._show_goodput(job.name, job.output))
        await shown(self._markdown("stages", table, "Stages"))
        await shown(self._show_lineage())
        if self._card and error is None:
            link = link_to(self._card, self._browsed)
            text = card_table(self.summaries, link)
            where = f"The run card: {code(self._card)}{how_to_open(link)}"
            await shown(self._markdown("card", text, where))

    async def _markdown(self, name: str, text: str, description: str) -> None:
        key = page_key(self._flow, name)
        await acreate_markdown_artifact(text, key=key, description=description)

    async def _show_loss(self, summary: Summary) -> None:
        url = join(parent(summary.manifest_url), LEDGER)
        if not await asyncio.to_thread(store.exists, url):
            return
        ledger = await asyncio.to_thread(store.read_bytes, url)
        picture = loss_curve(ledger, url, f"{summary.job}: loss, nats per token")
        if picture is not None:
            key = page_key(self._flow, "loss")
            description = f"Loss of {code(summary.job)} by step"
            url = await asyncio.to_thread(self._picture_url, f"{summary.job}-loss", picture)
            await acreate_image_artifact(url, key=key, description=description)

    def _picture_url(self, name: str, picture: str) -> str:
        """The URL of a file if TRAINYARD_BROWSE names a web server, otherwise a data URL: the
        profile's server may be out of reach for a browser."""
        url = join(self._root, "pages", f"{name}.svg")
        link = link_to(url, os.environ.get(BROWSE, ""))
        if not is_web(link):
            return data_url(picture)
        store.write_bytes(url, picture.encode())
        return link

    async def _show_goodput(self, name: str, output: Output) -> None:
        """Write the page with the goodput of a training, over all of its attempts."""
        found = await asyncio.to_thread(
            record_goodput, Path(self._runs, name), output, goodput_url(self._root, name)
        )
        if found is not None:
            await self._markdown("goodput", markdown(found), f"Where the time of {code(name)} went")

    async def _show_lineage(self) -> None:
        urls = {s.job: parent_of(s.manifest_url) for s in self.summaries if s.manifest_url}
        if not urls:
            return
        trained = [urls[s.job] for s in self.summaries if s.stage == TRAINED and s.job in urls]
        destination = (trained or list(urls.values()))[-1]
        lineage = await asyncio.to_thread(read_lineage, list(urls.values()), destination)
        await self._markdown("lineage", lineage_page(lineage), "Inputs and outputs of all stages")


async def show_failure(error: Exception) -> None:
    """Write the page that says why the running flow failed; so does its line in a list."""
    context = FlowRunContext.get()
    if context is None or context.flow is None:
        return
    reason = escape(brief(printable(str(error)), 2 * BRIEF_CHARS))
    key = page_key(context.flow.name, "failure")
    page = acreate_markdown_artifact(failure_page(error), key=key, description=reason)
    await shown(page)


def failure_page(error: Exception) -> str:
    """Markdown: why a flow failed, its log, and what to do."""
    log = str(getattr(error, "log", ""))
    lines = [f"**Failed:** {escape(printable(shortened(str(error))))}"]
    lines += [f"Its log: {code(log)}"] if log else []
    return "\n\n".join([*lines, "Retry, or the same command, reuses what is finished and saved."])


def parent_of(manifest_url: str) -> str:
    """The artifact of a manifest: its folder, or the prefix before `.manifest.json`."""
    folder, _, name = manifest_url.rpartition("/")
    prefix = name.removesuffix("manifest.json").rstrip(".")
    return join(folder, prefix) if prefix else folder


def card_table(summaries: Sequence[Summary], link: str) -> str:
    """Markdown: the link to the run card, and its most important numbers."""
    found: dict[str, Any] = {}
    for summary in summaries:
        found |= summary.metrics if summary.stage == "report" else {}
    before, after = (found.get(f"validation_{when}") or {} for when in ("before", "after"))
    rows = []
    for name, key in (("validation loss, nats per token", "loss"), PERPLEXITY):
        if key in after:
            first = f"{number(before[key])} to " if before.get("step") != after.get("step") else ""
            rows.append((name, f"{first}{number(after[key])}"))
    for name, key in (("training speed, tokens/s", "tokens_per_second"), TOKENS, PARAMETERS):
        if key in found:
            rows.append((name, number(found[key])))
    table = [
        "| of the run | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows),
    ]
    return "\n".join([f"[Open the run card]({link})", "", *(table if rows else ())])


def stage_table(summaries: Sequence[Summary]) -> str:
    """Markdown: a table of stage, state, seconds and output digest, as narrow as Prefect's pages
    are, and below it why each stage ran, and its metrics."""
    lines = ["| stage | state | seconds | output digest |", "| --- | --- | ---: | --- |"]
    for summary in summaries:
        cells = (
            code(summary.job),
            "reused" if summary.reused else "done",
            f"{summary.seconds:.1f}",
            code(summary.output_digest[:12]),
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for summary in summaries:
        facts = [escape(one) for one in (summary.reason, metrics_text(summary.metrics)) if one]
        lines += [f"- {code(summary.job)}: {'; '.join(facts)}"] if facts else []
    return "\n".join(lines)


def metrics_text(metrics: dict[str, Any]) -> str:
    """The first few metrics that are numbers."""
    numbers = {
        key: value
        for key, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    shown = list(numbers.items())[:SHOWN_METRICS]
    return ", ".join(f"{key} {number(value)}" for key, value in shown)
